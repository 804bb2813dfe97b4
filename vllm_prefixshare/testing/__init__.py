"""What tests, examples and benchmarks share."""
