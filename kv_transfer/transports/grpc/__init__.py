"""gRPC as a byte path: slower than the others, and works everywhere. Start at `transport.py`."""
