"""Benchmarks of one layer: times, parts of planning, several GPUs."""
