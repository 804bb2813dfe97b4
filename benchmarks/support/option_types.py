"""Types of command-line options; ``argparse`` names the option of a value that is none."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")


def count(text: str) -> int:
    """Type of an option: an integer of 1 or more."""
    if (value := int(text)) < 1:
        raise ArgumentTypeError("must be 1 or more")
    return value


def positive(text: str) -> float:
    """Type of an option: a number above 0."""
    if (value := float(text)) <= 0:
        raise ArgumentTypeError("must be more than 0")
    return value


def heads(text: str) -> tuple[int, int]:
    """Type of an option: query heads and KV heads, such as 32:8."""
    try:
        query_heads, kv_heads = map(int, text.split(":"))
    except ValueError:
        query_heads = kv_heads = 0
    if min(query_heads, kv_heads) < 1 or query_heads % kv_heads:
        raise ArgumentTypeError(
            "must be query:KV heads such as 32:8, the first a multiple of the second"
        )
    return query_heads, kv_heads


def several(of: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Type of an option: values separated by commas."""

    def values(text: str) -> list[T]:
        return [of(part) for part in text.split(",")]

    return values


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """Type of an option: known names, in any case, separated by commas."""

    def name(text: str) -> str:
        if (lower := text.lower()) not in known:
            raise ArgumentTypeError(f"{lower!r} is unknown: use {','.join(known)}")
        return lower

    return several(name)
