"""Text to tokens and back: tokenizers from GGUF files and Hugging Face folders, chat templates, incremental decoding.

Torch-free and without gRPC, so that the gateway can use it. Start at `engine/text/tokenizer.py`.
"""
