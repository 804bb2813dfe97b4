"""Accuracy of a real model, for ``fidelity.py``, besides the comparison of tokens.

- questions about facts in one document, whose answers are known;
- the protocol of vLLM issue 22103, in which cascade attention failed: many copies of two prompts in
  one batch;
- sampled tokens, whose log-probabilities are compared with a forward pass over the whole text, as
  in reinforcement learning. With ``r`` the probability of a token in the forward pass over that
  with which it was sampled, ``k1 = -log r`` and ``k3 = r - 1 - log r`` estimate the KL divergence
  (J. Schulman, "Approximating KL divergence", 2020); ``k3`` is never negative.

Intervals are of 95%: bootstrapped over requests, Wilson's for shares.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.engine import EngineProcess
from tests.support.engine_steps import Completion, Run, drive, score

NAMES = (
    "Arden", "Brenna", "Corvale", "Dunmore", "Eskdale", "Farrow", "Glenmoor", "Hollin",
    "Iverness", "Jarrow", "Kestrel", "Lorne", "Marlow", "Norwick", "Oakham", "Penrith",
    "Quarley", "Rosedale", "Selwick", "Thornby", "Ulverton", "Varley", "Westmere", "Yarrow",
)  # fmt: skip
#: Copies of each prompt in issue 22103; the copies of the second prompt are judged.
COPIES_A, COPIES_B = 32, 18
WORKED = (
    "Q: A shelf holds 4 red books and 5 blue books. How many books does it hold?\n"
    "A: 4 + 5 = 9. The answer is 9.\n\n"
    "Q: Anna has 12 pencils and gives 5 of them to Ben. How many pencils has she left?\n"
    "A: 12 - 5 = 7. The answer is 7.\n\n"
    "Q: A box holds 6 eggs. How many eggs do 3 boxes hold?\n"
    "A: 3 * 6 = 18. The answer is 18.\n\n"
)
QUESTION_A = "Q: A farmer has 15 sheep and buys 6 more. How many sheep does he have?\nA:"
QUESTION_B = "Q: A bus has 20 seats and 8 of them are taken. How many seats are free?\nA:"
RIGHT_B = "The answer is 12."


def mean_interval(
    requests: Sequence[np.ndarray], finish: Callable[[float], float] = float
) -> list[float]:
    """Mean over all values, and the bounds that hold it in 95% of resamples of whole requests.

    Args:
        requests: values of the tokens of each request.
        finish: monotonic function, applied to mean and bounds.
    """
    sums = np.array([r.sum() for r in requests], np.float64)
    counts = np.array([len(r) for r in requests], np.float64)
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(sums), (2000, len(sums)))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    values = [sums.sum() / counts.sum(), *np.quantile(means, [0.025, 0.975])]
    return [finish(value) for value in values]


def share_interval(right: int, of: int) -> list[float]:
    """A share, and Wilson's interval of 95%."""
    z, p = 1.96, right / of
    middle = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z * np.sqrt(p * (1 - p) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return [p, max(0.0, float(middle - half)), min(1.0, float(middle + half))]


def same_until(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))


class Questions:
    """Prompts for a real model.

    Args:
        model: checkpoint folder, with a tokenizer that has a chat template.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def facts(self) -> tuple[list[list[int]], list[str]]:
        """A question about each fact of one document, and the answers."""
        years = [str(1702 + 11 * i) for i in range(len(NAMES))]
        document = " ".join(
            f"The bridge of {name} was built in {year}."
            for name, year in zip(NAMES, years, strict=True)
        )
        prompts = []
        for name in NAMES:
            text = f"{document}\n\nIn which year was the bridge of {name} built?"
            message = [{"role": "user", "content": text}]
            chat = self._tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
            prompts.append(self._tokenizer.encode(chat, add_special_tokens=False))
        return prompts, years

    def copies(self) -> list[list[int]]:
        """``COPIES_A`` of one prompt, then ``COPIES_B`` of another."""
        a, b = (self._tokenizer.encode(WORKED + q) for q in (QUESTION_A, QUESTION_B))
        return [a] * COPIES_A + [b] * COPIES_B

    def text(self, completion: Completion) -> str:
        """The text of an answer."""
        text: str = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return text


def ask(
    engines: Sequence[EngineProcess], model: Path, prompts: list[list[int]], tokens: int
) -> list[dict[str, Any]]:
    """Measurements of each engine's answers; the first engine is stock.

    Args:
        prompts: prompts for sampling.
        tokens: number of tokens to sample for each prompt.
    """
    questions = Questions(model)
    facts, years = questions.facts()
    copies = questions.copies()
    stock = engines[0]
    alone: Run = stock.call(drive, copies[-1:], {"max_tokens": 24, "ignore_eos": True})
    found = []
    for engine in engines:
        engine.call(drive, facts[:1], {"max_tokens": 1})  # puts the document into the prefix cache
        answers: Run = engine.call(drive, facts, {"max_tokens": 24})
        said = [questions.text(c) for c in answers.completions]
        right = sum(year in text for year, text in zip(years, said, strict=True))

        crowd: Run = engine.call(drive, copies, {"max_tokens": 24, "ignore_eos": True})
        judged = crowd.completions[-COPIES_B:]
        expected = alone.completions[0].token_ids

        options = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
        sampled: Run = engine.call(drive, prompts, options)
        forward = stock.call(score, sampled.completions)
        found.append(
            {
                "questions": len(facts),
                "right": share_interval(right, len(facts)),
                "copies": COPIES_B,
                "copies_right": sum(RIGHT_B in questions.text(c) for c in judged),
                "copies_same": sum(c.token_ids == expected for c in judged),
                "sampled": divergence(sampled.completions, forward),
            }
        )
    return found


def divergence(sampled: Sequence[Completion], forward: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Compare sampled tokens with a forward pass over the whole text."""
    logs = [np.subtract(f, c.logprobs) for c, f in zip(sampled, forward, strict=True)]
    ratios = [np.exp(log) for log in logs]
    return {
        "tokens": sum(map(len, logs)),
        "ratio": mean_interval(ratios),
        "largest_ratio": float(max(r.max() for r in ratios)),
        "smallest_ratio": float(min(r.min() for r in ratios)),
        "k1": mean_interval([-log for log in logs]),
        "k3": mean_interval([r - 1 - log for r, log in zip(ratios, logs, strict=True)]),
    }


def compare(
    free: Sequence[Completion],
    free_stock: Sequence[Completion],
    forced: Sequence[Completion],
    forced_stock: Sequence[Completion],
) -> dict[str, Any]:
    """Compare greedy and forced tokens of one backend with stock's, with intervals."""
    agree, differences = [], []
    for a, b in zip(free, free_stock, strict=True):
        same = same_until(a.token_ids, b.token_ids)
        agree.append(np.arange(len(b.token_ids)) < same)
    for a, b in zip(forced, forced_stock, strict=True):
        differences.append(np.abs(np.subtract(a.logprobs, b.logprobs)))
    losses = [-np.array(c.logprobs) for c in forced]
    return {
        "greedy_tokens": sum(map(len, agree)),
        "agreement": mean_interval(agree),
        "forced_tokens": sum(map(len, differences)),
        "difference": mean_interval(differences),
        "largest_difference": float(max(d.max() for d in differences)),
        "perplexity": mean_interval(losses, lambda loss: float(np.exp(loss))),
    }
