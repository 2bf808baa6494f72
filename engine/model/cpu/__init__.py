"""The model as one native call a step, on the CPU. Start at `model.py`; kernels are in `engine/kernels/cpu`."""
