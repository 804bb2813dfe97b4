"""Dispatch of Triton launches: launch a kernel, or only compile what the launch would run.

Every launch of this package goes through ``launch``. Within ``only_compile`` the same calls
compile, so that ahead-of-time compilation makes exactly the binaries that are launched later.

Outside of CUDA graphs a step launches in every layer, and Triton's lookup of the binary for a call
with forty arguments takes the host 40 to 80 microseconds. ``launch`` keeps the binary by the
properties of the arguments from which Triton chooses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

_compiled: ContextVar[list[CompiledKernel] | None] = ContextVar("compiled", default=None)
#: by ``_choice``: a binary, and the compile-time arguments that follow the others in its launch
_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: JITFunction[Any], grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton or Gluon function, or only compile it within ``only_compile``.

    Args:
        args: its arguments up to the compile-time ones: tensors, tensor descriptors, numbers, None,
            or tuples of them.
        options: its compile-time arguments, each by name, and Triton's options.
    """
    compiled = _compiled.get()
    choice = None
    if compiled is None and isinstance(kernel, JITFunction):  # not the interpreter's
        choice = _choice(kernel, args, options)
        if choice is not None and (found := _known.get(choice)) is not None:
            binary, constants = found
            binary[(*grid, 1, 1)[:3]](*args, *constants)
            return
    binary = kernel.run(
        *args,
        grid=grid,
        warmup=compiled is not None,
        enable_fp_fusion=True,  # off unless asked for from Triton 3.10 on
        **options,
    )
    if compiled is not None:
        compiled.append(binary)
    elif choice is not None and isinstance(binary, CompiledKernel):  # None if a hook took the call
        names = kernel.arg_names[len(args) :]
        _known[choice] = binary, tuple(options[name] for name in names)


def _choice(
    kernel: JITFunction[Any], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Key of the binary: equal keys mean the same binary, though one binary may have several keys.
    None if an argument is not of the types that ``launch`` names.
    """
    driver: Any = triton.runtime.driver.active  # its type has no method that launching needs
    device = driver.get_current_device()
    # users and profilers may change these while kernels run
    knobs = triton.knobs.runtime.debug, triton.knobs.compilation.instrumentation_mode
    try:
        # a binary keeps its kernel, so no other gets the same id
        return id(kernel), device, *knobs, *options.items(), *[_looked_at(x) for x in args]
    except AttributeError:  # Triton takes it, or raises a better error
        return None


def _looked_at(x: Any) -> Any:
    """The properties of an argument from which Triton chooses a binary."""
    if isinstance(x, torch.Tensor):  # usually aligned; a launch has thirty, and tuples take time
        return (x.dtype,) if x.data_ptr() & 15 else x.dtype
    if isinstance(x, int):
        return type(x), x == 1, x & 15 == 0, x >> 31
    if x is None or isinstance(x, float):
        return type(x)
    if isinstance(x, tuple):
        return type(x), *map(_looked_at, x)
    return x.base.dtype, tuple(x.block_shape), x.layout


def has_dependent_launch(kernel: Any) -> bool:
    """Whether the GPU that Triton compiles this function for has programmatic dependent launch."""
    if not isinstance(kernel, JITFunction):  # the interpreter's
        return False
    driver: Any = triton.runtime.driver.active
    return bool(driver.get_current_target().arch >= 90)


def power_of_two(n: int) -> int:
    """``n`` rounded up to a power of two. Triton's function takes some microseconds."""
    return 1 << (n - 1).bit_length()


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
