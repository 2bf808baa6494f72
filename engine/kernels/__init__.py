"""The operations a model step is made of, and the seam where faster ones go.

- `interface.py`: the `Kernels` protocol, what `engine/model/llama.py` calls. Other sets (Triton, native) implement it.
- `reference.py`: each operation in plain PyTorch, as short as its formula. The oracle that every other set is tested
  against; not fast.
- `torch_kernels.py`: the plain path, the same operations arranged for speed with PyTorch calls only.

A kernel has the same name in the protocol, the oracle, the implementation and its test. An implementation that replaces
a whole step rather than single operations implements `engine.model.interface.LanguageModel` instead.
"""
