"""The decode tier's gRPC service: reserves blocks, takes over prefilled sequences, generates the rest.

Next: `servicer.py` for the session, `reservation_queue.py` for who gets blocks when.
"""
