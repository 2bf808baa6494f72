"""Gateways' sessions with a worker: commands in, events out, and what both tiers keep of their requests.

Knows no tier. Start at `session.py`.
"""
