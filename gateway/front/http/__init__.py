"""The OpenAI-compatible door: the same checks, admission and relay as gRPC, in JSON and server-sent events.

Start at `app.py`. Requests become the public API's message (`requests.py`), so that each field is checked in one place;
what comes back becomes OpenAI's objects (`responses.py`). Decides nothing about workers.
"""
