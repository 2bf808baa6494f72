"""The front of the cluster: admission, routing, the relay between client and workers, and the text side of a request.

Never loads torch, the engine's compute or the KV transfer; it sees KV only as handles whose bytes it passes on. A
request's way: `front/servicer.py` -> `relay/generation.py` -> `routing/admission.py` -> `relay/relay.py` ->
`workers/session.py` and back. `app.py` puts it together.
"""
