"""What model files say: GGUF and Hugging Face folders to a config and parameters by name. Torch only for tensors.

Start at `source.py` (from a name to files).
"""
