"""Models: reading configs and weights, the Llama-family forward, and the paged KV tensors it reads and writes.

`files/` reads what people have, `cpu/` and `cuda/` compute it natively, `llama.py` is the definition that both follow.
This file imports nothing, so that torch-free processes can use `engine.model.files`. Start at `interface.py` (what the
engine calls), then `loader.py`.
"""
