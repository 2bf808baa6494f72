"""The hand-off of one request's KV: who may write, what was written, and when it counts.

Decisions without I/O (`sender.py`, `receiver.py`, `lease.py`, `coverage.py`) and what carries them out: `exporter.py`
on the prefill side, `importer.py` on decode. Never opens a socket itself; byte paths are in `../transports`.
"""
