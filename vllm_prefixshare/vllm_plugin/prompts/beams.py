"""Candidates of beam search, of which only those that can become a beam are handled one by one.

In each step of ``LLM.beam_search`` vLLM makes a ``Logprob`` and a sequence of every candidate, 2 x
beam_width per beam, and ranks all of them. beam_width candidates become beams. Here vLLM returns
the log-probabilities as flat lists, NumPy finds the candidates that can be among the best, and
vLLM's own code ranks these. The log-probabilities of the sequences that are returned become
dictionaries at the end.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.logprobs import Logprob

#: Relative difference of two log-probabilities whose scores may be equal, because a score is their
#: quotient by a power of the length, rounded.
TOLERANCE = 1e-12


class Candidates:
    """The log-probabilities of a beam's next token.

    Args:
        logprobs: vLLM's ``FlatLogprobs``, of one position.
        chosen: indices of the candidates that can become a beam, or end one.
    """

    __slots__ = ("_as_dict", "_chosen", "_logprobs")

    def __init__(self, logprobs: Any, chosen: Sequence[int]) -> None:
        self._logprobs = logprobs
        self._chosen = chosen
        self._as_dict: dict[int, Logprob] | None = None

    def items(self) -> Iterator[tuple[int, Logprob]]:
        """Token id and log-probability of the chosen candidates, in the order of `as_dict`."""
        flat = self._logprobs
        for i in self._chosen:
            yield flat.token_ids[i], Logprob(flat.logprobs[i], flat.ranks[i])

    def as_dict(self) -> dict[int, Logprob]:
        """All candidates as vLLM's dictionary, the same object in each call."""
        if self._as_dict is None:
            self._as_dict = self._logprobs[0]
        return self._as_dict


def choose_candidates(
    beams: Sequence[Any], results: Sequence[Any], beam_width: int, eos_token_ids: Collection[int]
) -> None:
    """Replace the log-probabilities of the results of one beam search by `Candidates`.

    Args:
        beams: ``BeamSearchSequence`` objects of one length.
        results: the ``RequestOutput`` of each, with ``FlatLogprobs`` or none.
        beam_width: number of candidates that become beams.
        eos_token_ids: tokens that may end a beam; candidates with one are all chosen.
    """
    answered = [
        (beam, output)
        for beam, result in zip(beams, results, strict=True)
        if (output := result.outputs[0]).logprobs
    ]
    if not answered:
        return
    flat = [output.logprobs for _, output in answered]
    lengths = [len(logprobs.token_ids) for logprobs in flat]
    starts = np.cumsum([0, *lengths])
    ids = _joined((logprobs.token_ids for logprobs in flat), np.int64)
    totals = _joined((logprobs.logprobs for logprobs in flat), np.float64)
    totals += np.repeat([float(beam.cum_logprob) for beam, _ in answered], lengths)
    # the sampled token comes first, and again if it is among the best
    is_first = np.zeros(len(ids), bool)
    is_first[starts[:-1]] = True
    is_again = (ids == np.repeat(ids[is_first], lengths)) & ~is_first
    is_end = np.isin(ids, list(eos_token_ids)) & ~is_again
    is_ranked = ~(is_again | is_end)
    is_chosen = is_end | is_ranked & _may_be_best(np.where(is_ranked, totals, -np.inf), beam_width)
    for (_, output), chosen in zip(answered, np.split(is_chosen, starts[1:-1]), strict=True):
        output.logprobs = [Candidates(output.logprobs, np.flatnonzero(chosen).tolist())]


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


def append_position(
    flat: Any,
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


def with_dictionaries(beam: Any) -> None:
    """Give a ``BeamSearchSequence`` vLLM's dictionaries of log-probabilities."""
    beam.logprobs = [
        entry.as_dict() if isinstance(entry, Candidates) else entry for entry in beam.logprobs
    ]
