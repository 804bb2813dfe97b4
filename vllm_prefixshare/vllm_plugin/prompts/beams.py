"""Candidates of beam search, of which only those that can become a beam are handled one by one.

In each step of a beam search vLLM makes a ``Logprob`` and a sequence of every candidate, 2 x
beam_width per beam, and ranks all of them. beam_width candidates become beams. Here vLLM returns
the log-probabilities as flat lists, NumPy finds the candidates that can be among the best, and
vLLM's own code ranks these. The log-probabilities of the sequences that are returned become
dictionaries when they are read.
"""

from collections import UserList
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.logprobs import FlatLogprobs, Logprob

from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds

#: Relative difference of two log-probabilities whose scores may be equal, because a score is their
#: quotient by a power of the length, rounded.
TOLERANCE = 1e-12


class Candidates:
    """The log-probabilities of a beam's next token.

    Args:
        step: of the search.
        logprobs: of one position.
    """

    __slots__ = ("_as_dict", "_step", "chosen", "logprobs")

    def __init__(self, step: "Step", logprobs: FlatLogprobs) -> None:
        self._step = step
        self.logprobs = logprobs
        #: indices of the candidates that can become a beam, or end one
        self.chosen: list[int] = []
        self._as_dict: dict[int, Logprob] | None = None

    def items(self) -> Iterator[tuple[int, Logprob]]:
        """Token id and log-probability of the chosen candidates, in the order of `as_dict`. No
        beam may be added to the step afterwards.
        """
        self._step.choose()
        flat = self.logprobs
        for i in self.chosen:
            yield flat.token_ids[i], Logprob(flat.logprobs[i], flat.ranks[i])

    def as_dict(self) -> dict[int, Logprob]:
        """All candidates as vLLM's dictionary, the same object in each call."""
        if self._as_dict is None:
            self._as_dict = self.logprobs[0]
        return self._as_dict


class Step:
    """A step of one beam search.

    Args:
        beam_width: number of candidates that become beams.
        eos_token_ids: tokens that may end a beam; candidates with one are all chosen.
    """

    def __init__(self, beam_width: int, eos_token_ids: Collection[int]) -> None:
        self._beam_width = beam_width
        self._eos_token_ids = list(eos_token_ids)
        self._beams: list[tuple[float, Candidates]] = []

    def add(self, logprob: float, output: Any) -> None:
        """Replace the log-probabilities of a beam's ``CompletionOutput`` by `Candidates`.

        Args:
            logprob: of the beam so far. All beams of a step have the same length.
            output: has ``FlatLogprobs`` of one position, or none.
        """
        if output.logprobs:
            candidates = Candidates(self, output.logprobs)
            self._beams.append((logprob, candidates))
            output.logprobs = [candidates]

    def choose(self) -> None:
        """Choose among the candidates of all beams that were added, once."""
        beams, self._beams = self._beams, []
        if not beams:
            return
        flat = [candidates.logprobs for _, candidates in beams]
        lengths = [len(logprobs.token_ids) for logprobs in flat]
        starts = np.cumsum([0, *lengths])
        ids = _joined((logprobs.token_ids for logprobs in flat), np.int64)
        totals = _joined((logprobs.logprobs for logprobs in flat), np.float64)
        totals += np.repeat([float(logprob) for logprob, _ in beams], lengths)
        # the sampled token comes first, and again if it is among the best
        is_first = np.zeros(len(ids), bool)
        is_first[starts[:-1]] = True
        is_again = (ids == np.repeat(ids[is_first], lengths)) & ~is_first
        is_end = np.isin(ids, self._eos_token_ids) & ~is_again
        is_ranked = ~(is_again | is_end)
        ranked = np.where(is_ranked, totals, -np.inf)
        is_chosen = is_end | is_ranked & _may_be_best(ranked, self._beam_width)
        for (_, candidates), chosen in zip(beams, np.split(is_chosen, starts[1:-1]), strict=True):
            candidates.chosen = np.flatnonzero(chosen).tolist()


def _may_be_best(totals: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.bool_]:
    """Which of ``totals`` can have one of the ``count`` best scores, the first of equal ones."""
    if len(totals) <= count or np.isnan(totals).any():
        return np.ones(len(totals), bool)
    last = np.partition(totals, -count)[-count]
    margin = TOLERANCE * abs(last)
    if not np.isfinite(last) or ((totals != last) & (abs(totals - last) <= margin)).any():
        return totals >= last - margin  # scores may be equal where totals are not
    is_best = totals > last
    is_best[np.flatnonzero(totals == last)[: count - int(is_best.sum())]] = True
    return is_best


def _joined(lists: Iterable[Iterable[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.fromiter(chain.from_iterable(lists), dtype)


class BeamIds(TokenIds):
    """The token ids of a beam of a server's search, with the beam's log-probability so far, which
    the sum with a list of one token continues.
    """

    __slots__ = ("logprob", "next_logprobs")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logprob = 0.0
        self.next_logprobs: FlatLogprobs | None = None

    def __add__(self, other: list[int]) -> "BeamIds":  # type: ignore[override]
        total: BeamIds = super().__add__(other)  # type: ignore[assignment]
        flat = self.next_logprobs
        if flat is not None and len(other) == 1:
            total.logprob = self.logprob + flat.logprobs[flat.token_ids.index(other[0])]
        return total


def append_position(
    flat: FlatLogprobs,
    token_ids: list[int],
    logprobs: list[float],
    ranks: Iterable[int],
    decoded_tokens: Iterable[str | None],
) -> None:
    """``FlatLogprobs.append_fast`` without a step in Python per token."""
    ranks = list(ranks)
    length = min(len(token_ids), len(logprobs), len(ranks))
    flat.start_indices.append(len(flat.logprobs))
    flat.token_ids.extend(token_ids[:length])
    flat.logprobs.extend(logprobs[:length])
    flat.ranks.extend(ranks[:length])
    flat.decoded_tokens.extend(islice(decoded_tokens, length))
    flat.end_indices.append(len(flat.logprobs))


class BeamLogprobs(UserList[dict[int, Logprob]]):
    """The log-probabilities of a returned sequence: vLLM's list of dictionaries, made when it is
    first read. 256 beams have some 130,000 ``Logprob`` objects per step, which take longer than
    the step's ranking, and most callers read none.

    Args:
        positions: `Candidates` or dictionaries.
    """

    def __init__(self, positions: Iterable[Any] = ()) -> None:
        self._positions = positions

    @cached_property
    def data(self) -> list[dict[int, Logprob]]:  # type: ignore[override]
        """The dictionaries; beams of one candidate share one."""
        return [p.as_dict() if isinstance(p, Candidates) else p for p in self._positions]

    def __copy__(self) -> "BeamLogprobs":
        return BeamLogprobs(self.data.copy())

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.data,)


def with_dictionaries(returned: Any) -> None:
    """Give what a search returns, a sequence or an output, vLLM's dictionaries, if it has none."""
    if any(isinstance(position, Candidates) for position in returned.logprobs or ()):
        returned.logprobs = BeamLogprobs(returned.logprobs)
