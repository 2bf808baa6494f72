"""Conversion between protos and the engine's values, shared by gateway and workers. Torch-free."""
