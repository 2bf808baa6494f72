"""The model on a CUDA device: Triton kernels, CUDA graphs, KV that leaves beside the computation. Start at `model.py`.

Loads Triton: only who computes on a device imports it.
"""
