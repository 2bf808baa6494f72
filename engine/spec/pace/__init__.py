"""When to draft and how much: the chances of guesses, the cost of rows, and the choice between them.

Start at `pacer.py`.
"""
