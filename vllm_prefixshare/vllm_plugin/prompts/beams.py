"""Candidates of beam search that copy their beam's tokens only if they become a beam.

In each step vLLM makes a sequence of every candidate, 2 x beam_width per beam, and each copies the
beam's whole list of tokens and of log-probabilities; all but beam_width of them are dropped. Here
``beam.tokens + [token]`` is an `Extension` that refers to the beam's list. vLLM's own code chooses
the next beams; theirs become lists before the step returns.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds


class Extension:
    """A list and one more element, as far as the ranking of beams reads it."""

    __slots__ = ("base", "last")

    def __init__(self, base: list[Any], last: Any) -> None:
        self.base = base
        self.last = last

    def __len__(self) -> int:
        return len(self.base) + 1

    def __getitem__(self, index: int) -> Any:
        return self.last if index == -1 else self.as_list()[index]

    def as_list(self) -> list[Any]:
        """The elements as a new list."""
        return [*self.base, self.last]


class _ExtensibleList(list[Any]):
    """A list that does not copy its elements for ``self + [element]``."""

    __slots__ = ("_extension",)

    def __init__(self, elements: Iterable[Any]) -> None:
        super().__init__(elements)
        self._extension: Extension | None = None

    def __add__(self, other: list[Any]) -> Any:
        if len(other) != 1:
            return super().__add__(other)
        # all candidates of a beam get the same log-probabilities
        if self._extension is None or self._extension.last is not other[0]:
            self._extension = Extension(self, other[0])
        return self._extension


class _ExtensibleIds(TokenIds):
    """Token ids that are not copied for ``self + [token_id]``."""

    __slots__ = ()

    def __add__(self, other: list[Any]) -> Any:
        return Extension(self, other[0]) if len(other) == 1 else super().__add__(other)


def extensible(beams: Iterable[Any]) -> None:
    """Let the candidates of a step refer to the lists of their beams.

    Args:
        beams: ``BeamSearchSequence`` objects.
    """
    for beam in beams:
        array = beam.tokens.array if isinstance(beam.tokens, TokenIds) else None
        beam.tokens = _ExtensibleIds(beam.tokens, array)
        beam.logprobs = _ExtensibleList(beam.logprobs)


def settled(beams: Iterable[Any]) -> None:
    """Give beams lists of their own again."""
    for beam in beams:
        tokens = beam.tokens
        if isinstance(tokens, Extension):
            base: TokenIds = tokens.base  # type: ignore[assignment]
            array = np.append(base.array, np.int32(tokens.last))
            beam.tokens = TokenIds(tokens.as_list(), array)
        elif isinstance(tokens, _ExtensibleIds):
            beam.tokens = TokenIds(tokens, tokens.array)
        logprobs = beam.logprobs
        if isinstance(logprobs, Extension):
            beam.logprobs = logprobs.as_list()
        elif isinstance(logprobs, _ExtensibleList):
            beam.logprobs = list(logprobs)


def prompt_of(get_prompt: Callable[[Any], Any], beam: Any) -> Any:
    """The prompt of a beam's next request, whose ids are a list without further meaning."""
    tokens = beam.tokens
    if not isinstance(tokens, _ExtensibleIds):
        return get_prompt(beam)
    beam.tokens = TokenIds(tokens, tokens.array)
    try:
        return get_prompt(beam)
    finally:
        beam.tokens = tokens
