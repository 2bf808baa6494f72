"""What the prefill and decode services share: engine bootstrap, sessions' outboxes, registration, the WorkerService.

It knows neither tier. Next: `prefill_service/servicer.py` and `decode_service/servicer.py`.
"""
