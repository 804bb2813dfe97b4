"""From the block table to the forest of shared prefixes, and token trees of queries."""
