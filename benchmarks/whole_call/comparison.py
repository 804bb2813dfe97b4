"""What must be equal between rows, and what may differ.

Prompts must have the same token ids in all rows. Wherever two rows have the same token ids for an
answer, its text must be the same. Rows with the same attention backend must give the same token
ids where an offline engine runs batches of the same composition. Elsewhere differences are counted:
other kernels and other batches round in another way. So do two servers of unmodified vLLM, even for
requests one by one (on an H200 with vLLM 0.33, 3 of 4 answers differed).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.whole_call.client import Served
from benchmarks.whole_call.measuring import Outcome


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row compared with a reference.

    requests: number of answers compared.
    same_answers: share of them with the same token ids.
    faults: differences that must not be, in words.
    """

    requests: int
    same_answers: float
    faults: tuple[str, ...]

    def described(self) -> dict[str, object]:
        """For the file of results."""
        return asdict(self)


def compare(
    ours: Sequence[Outcome],
    reference: Sequence[Outcome],
    *,
    same_tokens: bool = False,
    same_cached: bool = False,
) -> Comparison:
    """Compare the runs of a workload; runs that only one side has are ignored.

    Args:
        same_tokens: whether other token ids are a fault, not just counted.
        same_cached: whether other numbers of cached tokens are a fault.
    """
    faults: list[str] = []
    requests = same = 0
    for run, (mine, theirs) in enumerate(zip(ours, reference, strict=False)):
        if mine.prompt_digests != theirs.prompt_digests:
            faults.append(f"run {run}: token ids of prompts differ")
        if mine.num_prompt_tokens != theirs.num_prompt_tokens:
            faults.append(f"run {run}: numbers of prompt tokens differ")
        if same_cached and mine.num_cached_tokens != theirs.num_cached_tokens:
            faults.append(
                f"run {run}: {sum(mine.num_cached_tokens)} cached tokens instead of "
                f"{sum(theirs.num_cached_tokens)}"
            )
        if len(mine.token_ids) != len(theirs.token_ids):
            faults.append(f"run {run}: {len(mine.token_ids)} answers instead of "
                          f"{len(theirs.token_ids)}")  # fmt: skip
            continue
        equal = [a == b for a, b in zip(mine.token_ids, theirs.token_ids, strict=True)]
        requests += len(equal)
        same += sum(equal)
        texts = zip(equal, mine.texts, theirs.texts, strict=True)
        for number, (is_equal, text, expected) in enumerate(texts):
            if is_equal and text != expected:
                faults.append(
                    f"run {run}, answer {number}: text {text[:80]!r} instead of "
                    f"{expected[:80]!r} for the same token ids"
                )
        if same_tokens and not all(equal):
            faults.append(f"run {run}: {len(equal) - sum(equal)} of {len(equal)} answers differ")
    return Comparison(requests, same / requests if requests else 1.0, tuple(faults))


def compare_served(ours: Sequence[Served], reference: Sequence[Served]) -> Comparison:
    """Compare answers under load, of which there are no token ids. Their batches depend on when
    requests arrive, so that other texts are counted only.
    """
    faults = []
    if len(ours) != len(reference):
        faults.append(f"{len(ours)} answers instead of {len(reference)}")
    pairs = list(zip(ours, reference, strict=False))
    for what in ("num_prompt_tokens", "num_tokens"):
        if wrong := sum(getattr(a, what) != getattr(b, what) for a, b in pairs):
            faults.append(f"{wrong} answers with another {what}")
    same = sum(a.text == b.text for a, b in pairs)
    return Comparison(len(pairs), same / len(pairs) if pairs else 1.0, tuple(faults))
