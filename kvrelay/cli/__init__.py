"""The command line. Each command is a small module; `kvrelay/cli/main.py` puts them together."""
