"""The door to clients: services, and the way between the public protos and values. Decides nothing about workers.

Start at `servicer.py`.
"""
