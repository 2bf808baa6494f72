"""UCX through ucxx: RDMA where there is any, else TCP. Start at `transport.py`."""
