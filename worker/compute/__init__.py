"""What a worker computes with: which kernels and how large a cache, the engine built from that, and its drafters.

Knows no gRPC. Start at `bootstrap.py`; `plan.py` is what `kvrelay check` asks as well.
"""
