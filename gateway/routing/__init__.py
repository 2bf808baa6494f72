"""Who runs when and where: admission, the gate before the prefill tier, and the choice of workers.

Decisions over what workers have told; nothing here sends. Start at `router.py`.
"""
