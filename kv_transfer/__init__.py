"""Moves KV blocks from a prefill worker to a decode worker, and never lets wrong KV be read.

It knows leases, frames, transports and the hand-off between the two sides; it knows nothing of services, scheduling or
requests, and never allocates or frees a block. Start at `exporter.py` (prefill) or `importer.py` (decode), then
`handoff_sender.py` / `handoff_receiver.py` for the decisions and `transport.py` for the contract of a byte path.
"""
