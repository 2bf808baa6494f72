"""The prefill tier's gRPC service: computes prompts, streams their KV to decode workers, samples the first token.

Next: `servicer.py` for the session, `job.py` for one request's life.
"""
