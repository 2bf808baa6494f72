"""Readers of the headers of model files, for whoever needs them: the text side and the engine.

Files come from anywhere: every count is bounded before anything is built. No tensors, no torch.
"""
