"""Ahead-of-time compilation of kernels, and the dispatch of compiled ones."""
