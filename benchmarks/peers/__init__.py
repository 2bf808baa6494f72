"""Other systems that `benchmarks/compare.py` measures beside kvrelay, each in processes of its own."""
