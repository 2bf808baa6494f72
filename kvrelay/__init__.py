"""kvrelay's command line, Python client and generated stubs (`kvrelay.v1`)."""

__version__ = "0.1.0"
