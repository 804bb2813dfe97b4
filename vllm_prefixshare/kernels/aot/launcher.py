"""Launching Triton kernels, or only compiling what a launch would run.

Every launch of this package goes through ``launch``. Within ``only_compile`` the same calls
compile, so what is compiled ahead is what is launched later.

Outside of CUDA graphs a step launches in every layer, and Triton takes the host 40 to 80
microseconds to find the binary for a call with forty arguments. So ``launch`` asks once for all
calls between which Triton could not choose, and keeps the binary.
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
        args: its arguments up to the compile-time ones: tensors, tensor descriptors, numbers, None.
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
    """Equal for calls that Triton has one binary for; it may differ between others, too. None where
    an argument is not of the types that ``launch`` names.
    """
    driver: Any = triton.runtime.driver.active  # its type has no method that launching needs
    device = driver.get_current_device()
    # users and profilers may change these while kernels run
    knobs = triton.knobs.runtime.debug, triton.knobs.compilation.instrumentation_mode
    try:
        # a binary keeps its kernel, so no other gets the same id
        return id(kernel), device, *knobs, *options.items(), *[_looked_at(x) for x in args]
    except AttributeError:  # Triton may take it, or says what is wrong with it
        return None


def _looked_at(x: Any) -> Any:
    """What Triton looks at in an argument to choose a binary."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() & 15 == 0
    if isinstance(x, int):
        return type(x), x == 1, x & 15 == 0, x >> 31
    if x is None or isinstance(x, float):
        return type(x)
    return x.base.dtype, tuple(x.block_shape), x.layout


def has_dependent_launch(kernel: Any) -> bool:
    """Whether the GPU that Triton compiles this function for has programmatic dependent launch."""
    if not isinstance(kernel, JITFunction):  # the interpreter's
        return False
    driver: Any = triton.runtime.driver.active
    return bool(driver.get_current_target().arch >= 90)


def power_of_two(n: int) -> int:
    """The least power of two that is not below ``n``. Triton's own takes some microseconds."""
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
