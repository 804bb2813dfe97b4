"""Helpers of the benchmarks: programs, results, published tables."""
