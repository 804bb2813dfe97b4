"""Helpers of the benchmarks: programs, results, charts."""
