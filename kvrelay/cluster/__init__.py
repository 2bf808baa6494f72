"""A whole cluster on this machine: gateway and workers as child processes that one object starts, watches and stops.

Part of the server's distribution. Start at `local.py`.
"""
