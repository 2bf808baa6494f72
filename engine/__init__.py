"""The inference engine: sequences, scheduling, paged KV cache, model, sampling and the loop that owns the device.

It knows nothing of gRPC or of how KV blocks travel; the services put those around it. Start at `engine/engine.py`.
"""
