"""One request's life, from checked fields to its last token: completions, attempts, recovery, text and counts.

Knows workers only as sessions that take commands and post events. Start at `generation.py`, then `relay.py`.
"""
