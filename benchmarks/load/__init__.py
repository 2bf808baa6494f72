"""`kvrelay bench load`: how a cluster serves many requests: closed loop, open loop, or a recorded trace."""
