"""Benchmarks of the whole engine: decode time, arrivals, order, routing, start-up."""
