"""Prefix-sharing-aware scheduling of waiting requests."""
