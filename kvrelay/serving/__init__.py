"""What every server process has around its servicers: interceptors, telemetry, health, life, settings.

Torch-free; may import grpc, never the stubs. Knows nothing of sequences or models. Start at `server.py`.
"""
