"""Moves KV blocks from a prefill worker to a decode worker, and never lets wrong KV be read.

It knows leases, frames, transports and the hand-off between the two sides; it knows nothing of services, scheduling or
requests, and never allocates or frees a block. Start at `handoff/exporter.py` (prefill) or `handoff/importer.py`
(decode), then `handoff/sender.py` / `handoff/receiver.py` for the decisions and `transports/port.py` for the contract
of a byte path.
"""
