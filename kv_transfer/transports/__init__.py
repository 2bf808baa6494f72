"""Byte paths between a prefill and a decode worker. They carry frames and never look into them.

`port.py` is the contract, `registry.py` picks the best path that two workers share. One package for each transport
but the smallest, `inproc.py`.
"""
