"""Text to tokens and back: tokenizers, chat templates, what control tokens mean, incremental decoding.

Gateways hide control tokens and workers stop at them, so both read a model's files with this code. Torch-free and
without gRPC. Start at `tokenizer.py`; which tokens end a turn is in `roles.py`.
"""
