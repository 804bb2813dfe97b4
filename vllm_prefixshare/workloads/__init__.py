"""Batches with shared prefixes to plan, test and measure with."""
