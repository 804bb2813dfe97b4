"""Ahead-of-time compilation of kernels, and launches of compiled ones."""
