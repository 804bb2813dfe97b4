"""Gluon functions under one name each, for Triton releases from 3.6 on.

Gluon is experimental: releases rename what it offers. Names are looked up instead of comparing
versions, so that a release that keeps both names, or reverts a change, works as well.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


def _first(owner, *names):
    """The first of these names that ``owner`` has."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise ImportError(f"{owner.__name__} has none of {', '.join(names)}")


# synchronise the threads of a warp group: `thread_barrier` before Triton 3.7
barrier = _first(gl, "barrier", "thread_barrier")
# one box of a tensor descriptor into shared memory: `async_copy_global_to_shared` before
# Triton 3.8, and deprecated from there on
async_load = _first(tma, "async_load", "async_copy_global_to_shared")
# shared memory under another type or shape: `_reinterpret` before Triton 3.9
reinterpret = _first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
