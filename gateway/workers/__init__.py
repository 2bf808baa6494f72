"""The gateway's side of its workers: who is registered, one session to each, and what is said over it.

Never decides which request goes where. Start at `pool.py`.
"""
