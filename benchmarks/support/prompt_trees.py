"""Prompts that form a tree: FastTree's four workloads of whole engines (section 6.2), as the
artifact's ``sglang_v0.2.13_bench/benchmarks`` builds them, and FlashForge's sweeps (section 6.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptTree:
    """Shared texts in a tree, and as many requests with private tokens below each leaf.

    parents: parent of each text, -1 for a root; parents come first. tokens: of each text.
    own_tokens: tokens of a request's prompt after its texts.
    """

    title: str
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    per_leaf: int
    own_tokens: int

    @property
    def leaves(self) -> list[int]:
        """Texts that no other text continues."""
        return sorted(set(range(len(self.parents))) - set(self.parents))

    @property
    def num_reqs(self) -> int:
        return len(self.leaves) * self.per_leaf

    @property
    def document_tokens(self) -> int:
        """Tokens of the texts above a request, where they are most."""
        depths: list[int] = []
        for parent, count in zip(self.parents, self.tokens, strict=True):
            depths.append(count + (depths[parent] if parent >= 0 else 0))
        return max(depths)

    def with_requests(self, generated: int) -> tuple[list[int], list[int]]:
        """Parents and tokens of a forest whose leaves are the requests, each with ``generated``
        tokens of its answer.
        """
        below = [leaf for leaf in self.leaves for _ in range(self.per_leaf)]
        own = [self.own_tokens + generated] * len(below)
        return [*self.parents, *below], [*self.tokens, *own]

    def cached_prompts(self, vocab: int) -> list[list[int]]:
        """The texts above each leaf, without requests: random tokens, always the same ones."""
        import numpy as np

        rng = np.random.default_rng([3, *self.tokens])
        paths: list[list[int]] = []
        for parent, count in zip(self.parents, self.tokens, strict=True):
            above = paths[parent] if parent >= 0 else []
            paths.append([*above, *rng.integers(0, vocab, count).tolist()])
        return [paths[leaf] for leaf in self.leaves]

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        """The requests; another seed continues the same texts with other tokens."""
        import numpy as np

        rng = np.random.default_rng([4, seed, self.num_reqs, self.own_tokens])
        own: Any = rng.integers(0, vocab, (self.num_reqs, self.own_tokens))
        texts = self.cached_prompts(vocab)
        return [[*texts[i // self.per_leaf], *more] for i, more in enumerate(own.tolist())]

    def distinct_tokens(self, generated: float) -> float:
        """Tokens in the KV cache, shared ones once, when each request has ``generated`` more."""
        return sum(self.tokens) + self.num_reqs * (self.own_tokens + generated)

    def scaled(self, scale: float) -> "PromptTree":
        """A smaller workload for a trial of the benchmark: fewer requests, shorter texts; of texts
        that form no tree fewer of them, too.
        """
        if scale == 1:
            return self
        kept = len(self.tokens)
        if max(self.parents) < 0:
            kept = max(min(2, kept), round(kept * scale))
        return replace(
            self,
            parents=self.parents[:kept],
            tokens=tuple(max(16, round(count * scale)) for count in self.tokens[:kept]),
            per_leaf=max(min(2, self.per_leaf), round(self.per_leaf * scale)),
            own_tokens=max(16, round(self.own_tokens * scale)),
        )


def shared_documents(
    title: str, documents: int, per_document: int, document_tokens: int, own_tokens: int
) -> PromptTree:
    """Documents, each with the same number of requests that add tokens of their own."""
    parents, tokens = (-1,) * documents, (document_tokens,) * documents
    return PromptTree(title, parents, tokens, per_document, own_tokens)


#: tokens of an answer
ANSWER = 256
#: tokens of the Meta AI system prompt, and of its levels with another country and language
SYSTEM, LEVELS = 3193, (459, 38, 584 + 2112)
#: tokens that neither paper nor artifact has: of a GSM8K question, of a shot with its answer. What
#: the artifact puts before each chain of C, 10 to 25 tokens, is left out.
QUESTION, SHOT = 60, 150
#: the artifact cuts the Llama 2 report into documents of a little more than these tokens
DOCUMENT = 1100


def radix(paths: Sequence[Sequence[int]], tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parents and tokens of the tree of these paths, whose parts have equally many tokens."""
    nodes: dict[tuple[int, ...], int] = {}
    parents = []
    for path in sorted(map(tuple, paths)):
        for end in range(1, len(path) + 1):
            if path[:end] not in nodes:
                nodes[path[:end]] = len(parents)
                parents.append(nodes[path[: end - 1]] if end > 1 else -1)
    return tuple(parents), (tokens,) * len(parents)


def document_paths(branches: int = 16, documents: int = 17, each: int = 4) -> list[list[int]]:
    """The documents of each branch of workload D, drawn as the artifact draws them (seed 0)."""
    drawn = Random(0)
    return [sorted(drawn.sample(range(documents), each)) for _ in range(branches)]


FASTTREE = {
    "fasttree_a": PromptTree(
        "A, multi-level system prompt",
        # countries: United States, Canada, China; languages: English and Spanish below the first
        (-1, 0, 0, 0, 1, 1, 2, 3),
        (LEVELS[0], *[LEVELS[1]] * 3, *[LEVELS[2]] * 4),
        128,
        QUESTION,
    ),
    "fasttree_b": PromptTree(
        "B, few-shot", (-1, *[0] * 8), (SYSTEM, *[20 * SHOT] * 8), 16, QUESTION
    ),
    "fasttree_c": PromptTree(
        "C, multi-chain reasoning", (-1, *[0] * 32), (SYSTEM, *[QUESTION] * 32), 4, 0
    ),
    "fasttree_d": PromptTree(
        "D, multi-document QA", *radix(document_paths(), DOCUMENT), 8, QUESTION
    ),
}

#: a tree of FlashForge: its name, and parents and tokens of its nodes; leaves are requests
Nodes = tuple[str, list[int], list[int]]
#: context of FlashForge's sweeps in engines, which hold the KV of every node: 258k tokens at most
FORGE_CONTEXT = 24_576


def level_nodes(levels: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Parents and tokens of the nodes of a regular tree, or forest.

    Args:
        levels: for each level the number of its nodes, and the tokens of each of them.
    """
    parents = [-1] * levels[0][0]
    begin = 0
    for (above, _), (count, _) in pairwise(levels):
        parents += [begin + i * above // count for i in range(count)]
        begin += above
    return parents, [tokens for count, tokens in levels for _ in range(count)]


def spec_of(levels: Sequence[tuple[int, int]]) -> str:
    """Its description for ``trees.tree``."""
    return "_".join(",".join(map(str, of)) for of in zip(*levels, strict=True))


def flashforge_trees(context: int) -> dict[str, list[Nodes]]:
    """FlashForge's five sweeps, with a context of so many tokens. Where the paper leaves a size
    open: two requests for binary trees of depth 2, eight for the shared ratio, 256 private tokens
    for the batch.
    """
    ratios = [context * percent // 100 for percent in (10, 30, 50, 70, 90)]
    levels = {
        "length": [[(1, context), (2, private)] for private in (512, 1024, 2048, 4096, 8192)],
        "batch": [[(1, context), (batch, 256)] for batch in (4, 8, 16, 32, 64)],
        "depth": [
            [(2**level, context // depth) for level in range(depth)] for depth in range(2, 7)
        ],
        "ratio": [[(1, shared), (8, (context - shared) // 8)] for shared in ratios],
    }
    found = {
        sweep: [(spec_of(each), *level_nodes(each)) for each in of] for sweep, of in levels.items()
    }
    shapes = {}
    for arity, depth in ((2, 4), (3, 3), (4, 3), (5, 3)):
        count = sum(arity**level for level in range(depth))
        shapes[f"full {arity}T"] = [-1, *((i - 1) // arity for i in range(1, count))]
    # only the left one of two children has children
    shapes["degenerate tree"] = [-1, *(max(0, 2 * (i // 2) - 1) for i in range(10))]
    # the tokens are divided over all nodes evenly
    found["shape"] = [
        (name, parents, [context // len(parents)] * len(parents))
        for name, parents in shapes.items()
    ]
    return found


#: all but the length, which ``benchmarks.engine`` sweeps up to 120k tokens
FLASHFORGE = {
    f"forge_{sweep}{i}": PromptTree(
        f"FlashForge, {sweep}: {name}", tuple(parents), tuple(tokens), 1, 64
    )
    for sweep, of in flashforge_trees(FORGE_CONTEXT).items()
    if sweep != "length"
    for i, (name, parents, tokens) in enumerate(of, 1)
}
