"""The native CPU kernels: C++ sources, their build at first use, and the ctypes bindings.

- `src/`: the sources. `step.h` is a whole model step; `gemm.h`, `attention.h` and `activations.h` are its parts,
  `simd.h` the vector operations that all of it is written in, `team.h` the threads.
- `build.py`: which variant this CPU runs, and compiling it once.
- `library.py`: the C interface of `src/api.cpp` as Python functions on numpy arrays.

`engine/model/cpu/model.py` makes a `LanguageModel` of it. Torch-free.
"""
