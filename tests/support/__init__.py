"""What the tests, the benchmarks and the example share."""
