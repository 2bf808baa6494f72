"""The trained draft head (EAGLE-3, arXiv 2503.01840): its file, its two implementations, and the drafter that runs it.

Start at `drafter.py`; what a head computes is in `format.py`.
"""
