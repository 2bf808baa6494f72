"""Readers of the headers of model files, for whoever needs them: the text side and the engine.

They read what a stranger may have written: every count is bounded before anything is built. No tensors, no torch.
"""
