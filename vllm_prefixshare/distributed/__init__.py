"""Decode attention over KV that is sharded along the sequence across ranks (Tree Attention)."""
