"""Speculative decoding: drafters propose, one verifier accepts. Tokens never depend on it."""
