"""What every service needs around its servicers: options, statuses, interceptors, telemetry, health, life, settings.

Torch-free; may import grpc, never the stubs. Knows nothing of sequences or models. Start at `engine/serving/server.py`.
"""
