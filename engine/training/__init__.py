"""Trains draft heads by self-distillation: the target writes its own training text, then teaches a head to foresee it.

Offline work around the engine; no serving code imports it. `pipeline.train_drafter` is the way in, `kvrelay
train-drafter` its command. The head's file is `engine/spec/head/format.py`, its use in serving `engine/spec`.
"""
