"""Triton's interpreter with products of bfloat16."""

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=not torch.cuda.is_available())
def bfloat16_in_the_interpreter(monkeypatch):
    """Make Triton's interpreter multiply bfloat16 as numbers. Without this change it multiplies the
    16 bits of each number as integers.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    plain = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        return plain(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
