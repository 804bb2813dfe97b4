"""Launching Triton kernels, or only compiling what a launch would run.

Every launch of this package goes through ``launch``. Within ``only_compile`` the same calls
compile, so what is compiled ahead is what is launched later.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

_compiled: ContextVar[list[CompiledKernel] | None] = ContextVar("compiled", default=None)


def launch(kernel: JITFunction[Any], grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton or Gluon function, or only compile it within ``only_compile``."""
    compiled = _compiled.get()
    binary = kernel.run(
        *args,
        grid=grid,
        warmup=compiled is not None,
        enable_fp_fusion=True,  # off unless asked for from Triton 3.10 on
        **options,
    )
    if compiled is not None:
        compiled.append(binary)


@contextmanager
def only_compile() -> Iterator[list[CompiledKernel]]:
    """Within this context launches compile, and nothing runs; tensors may be on ``meta``.

    Yields:
        Triton's ``CompiledKernel`` of each launch, in order.
    """
    binaries: list[CompiledKernel] = []
    token = _compiled.set(binaries)
    try:
        yield binaries
    finally:
        _compiled.reset(token)
