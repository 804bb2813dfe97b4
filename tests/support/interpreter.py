"""Triton's interpreter without work that has no effect on results: a quarter of the time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def leave_out_idle_work() -> None:
    """Change Triton's interpreter for this process.

    It replaces the functions of ``triton.language`` at the start of a launch, and again at each
    call of a function in the kernel, where it finds them replaced. It computes whether integers
    overflow, and checks the result in debug mode only. For each result it makes a table of data
    types, a block type, and the type of the shape as a tuple, which is never asked for.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    tl.pointer_type.__hash__ = tl.dtype.__hash__  # by its name
    np_dtype = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: np_dtype(dtype.scalar)
    tl.block_type.__init__ = _made_once(tl.block_type.__init__)
    tl.core.tuple.__init__ = _init_tuple
    tl.core.tuple.type = cached_property(lambda self: tl.core._type_for_tuple_values(self.values))
    tl.core.tuple.type.__set_name__(tl.core.tuple, "type")


def _patched_once(patch: Callable[..., Any]) -> Callable[..., Any]:
    def patch_lang(fn: Callable[..., Any]) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(lang.load) for lang in languages):
            return interpreter._LangPatchScope()  # nothing to undo
        return patch(fn)

    return patch_lang


def _made_once(init: Callable[..., None]) -> Callable[..., None]:
    @cache
    def attributes(element_ty: tl.dtype, *shape: int) -> dict[str, Any]:
        block = object.__new__(tl.block_type)
        init(block, element_ty, list(shape))
        return vars(block)

    def init_block(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[Any]) -> None:
        vars(self).update(attributes(element_ty, *(getattr(n, "value", n) for n in shape)))

    return init_block


def _init_tuple(self: tl.core.tuple, args: Sequence[Any], type: Any = None) -> None:
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)
