"""What all benchmarks share: the report and its outputs, statistics, prompts, measured requests, clusters."""
