"""Triton kernels for CUDA devices of compute capability 8.0 and up (fp8: 8.9 and up).

Each module holds one kernel family with its launchers, which check shapes, strides and dtypes. The oracle of every
launcher has its name, in `engine/kernels/reference.py`, `engine/kernels/reference_quant.py` or
`engine/kernels/reference_sampling.py`. Nothing here owns device memory beyond a call's results and scratch.
`engine/model/cuda/model.py` builds a model from these.

On a machine without a GPU everything runs under Triton's interpreter, `TRITON_INTERPRET=1` set before the first import.
It has no bf16 arithmetic and multiplies bf16 wrongly, so there fp16 and fp32 stand for it.

Importing this package itself loads nothing.
"""
