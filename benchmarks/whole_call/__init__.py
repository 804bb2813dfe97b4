"""Benchmark of the whole call: rows, texts, workloads, measurements, comparison, tables."""
