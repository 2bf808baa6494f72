"""Models: reading configs and weights, the Llama-family forward, and the paged KV tensors it reads and writes.

This file imports nothing, so that torch-free processes can use `engine.model.source` and `engine.model.gguf_file`.
Start at `interface.py` (what the engine calls), then `loader.py`.
"""
