"""Shared memory between two processes of one user on one host. Start at `transport.py`."""
