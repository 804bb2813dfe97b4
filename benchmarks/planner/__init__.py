"""Benchmarks of planning: its time, and plans of two versions."""
