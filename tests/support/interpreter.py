"""Triton's interpreter without work that has no effect on results; it takes half the time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def leave_out_idle_work() -> None:
    """Change Triton's interpreter for this process.

    It replaces the functions of ``triton.language`` at the start of a launch, and again at each
    call of a function in the kernel, where it finds them replaced. It computes whether integers
    overflow, and checks the result in debug mode only.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)


def _patched_once(patch: Callable[..., Any]) -> Callable[..., Any]:
    def patch_lang(fn: Callable[..., Any]) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(lang.load) for lang in languages):
            return interpreter._LangPatchScope()  # nothing to undo
        return patch(fn)

    return patch_lang
