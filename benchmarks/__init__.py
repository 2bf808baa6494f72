"""Benchmarks that `kvrelay bench` runs: each measures one promise and reports medians with what they were measured on.

Never imported by the services. Settings and figures are described with each benchmark.
"""
