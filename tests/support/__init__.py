"""Helpers of the tests, the benchmarks and the examples."""
