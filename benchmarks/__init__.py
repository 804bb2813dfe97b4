"""Benchmarks. Each is run by its module: `python -m benchmarks.engine --help`."""
