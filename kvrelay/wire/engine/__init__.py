"""Families of messages whose values are the engine's: requests, outputs, hand-off, layout, workers, sessions.

Between gateway and workers only; `commands.py` and `events.py` are a session's two directions. Torch-free.
"""
