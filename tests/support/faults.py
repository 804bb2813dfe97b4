"""Faults that are planted in a function."""

import itertools
from collections.abc import Callable
from typing import Any


def failing_at(function: Callable[..., Any], *at: int, error: Exception) -> Callable[..., Any]:
    """The function, whose calls with these numbers, from 1 on, raise an error."""
    numbers = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) in at:
            raise error
        return function(*args, **kwargs)

    return call
