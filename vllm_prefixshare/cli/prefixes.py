"""Prefixes of a file's prompts: the blocks that vLLM's prefix caching would share, and what breaks
a shared prefix.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_prefixshare.cli.batches import MAX_ENTRIES
from vllm_prefixshare.core import IntArray, PrefixShareError
from vllm_prefixshare.planning.forest.prefix_tree import forest_from_blocks

#: Maximum number of different blocks of a file; each takes some 300 bytes.
MAX_BLOCKS = 1 << 22
#: Requests that are compared token by token at each place where a prefix breaks.
MAX_COMPARED = 16
#: Base of the hashes of tokens, odd: it has an inverse modulo 2**64.
HASH_BASE = 0x9E3779B97F4A7C15
#: Tokens that are shown where a prefix breaks.
SHOWN_TOKENS = 8


class Prompt(NamedTuple):
    """A prompt as blocks.

    blocks: int32 ids of the full blocks that may be shared; equal ids are equal prefixes.
    num_known: leading blocks that an earlier prompt of the file has.
    rest: int32 token ids after these blocks, at least one.
    """

    name: str
    blocks: IntArray
    num_known: int
    rest: IntArray
    num_tokens: int
    is_text: bool


@dataclass(slots=True)
class Break:
    """A place where prompts leave a prefix that they share with an earlier prompt.

    block: the first block that differs; ``block * block_size`` tokens are shared before it.
    token: the first token that differs, in ``first``.
    first, other: indices of the first prompt that leaves there, and of the one that it leaves.
    num_prompts: prompts that leave there.
    equal_after: mean number of later tokens of such a prompt that ``other`` has after the break as
        well: they would be shared if the prompts did not differ before them.
    """

    block: int
    token: int
    first: int
    other: int
    num_prompts: int = 0
    equal_after: float = 0.0
    compared: int = 0


@dataclass
class PrefixBlocks:
    """The blocks of all prompts of a file, as an unlimited prefix cache would hold them.

    prompts: in the order in which they were added.
    """

    block_size: int
    prompts: list[Prompt] = field(default_factory=list)
    #: a block is identified by the block before it, 0 for none, and its own tokens
    _ids: dict[tuple[int, bytes], int] = field(default_factory=dict)
    #: by block id: its tokens, and the first prompt that continues after it
    _tokens: list[bytes] = field(default_factory=lambda: [b""])
    _continued: list[int] = field(default_factory=lambda: [-1])
    _breaks: dict[int, Break] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Number of different blocks."""
        return len(self._tokens) - 1

    def add(self, name: str, tokens: IntArray, samples: int = 1, is_text: bool = True) -> None:
        """Add a prompt.

        Args:
            tokens: int32, at least one.
            samples: how often it is added.
            is_text: whether the ids were made from text here.

        Raises:
            PrefixShareError: the prompts have too many different blocks.
        """
        # vLLM computes the last token of a prompt in any case, so its block is not shared
        shareable = (len(tokens) - 1) // self.block_size
        ids = np.empty(shareable, np.int32)
        before = 0
        known = shareable
        for i in range(shareable):
            key = before, tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()
            block = self._ids.get(key, 0)
            if block == 0:
                known = min(known, i)
                block = self._ids[key] = len(self._tokens)
                self._tokens.append(key[1])
                self._continued.append(-1)
                if self._continued[before] < 0:
                    self._continued[before] = len(self.prompts)
            ids[i] = before = block
        if self.num_blocks > MAX_BLOCKS:
            raise PrefixShareError(
                f"{name} and the prompts before it have more than {MAX_BLOCKS} different blocks: "
                "give --limit a smaller number of prompts."
            )
        rest = tokens[shareable * self.block_size :].copy()
        self.prompts.append(Prompt(name, ids, known, rest, len(tokens), is_text))
        if known < shareable:
            self._note_break(len(self.prompts) - 1)
        self.prompts += [self.prompts[-1]._replace(num_known=shareable)] * (samples - 1)

    def tokens_of(self, index: int) -> IntArray:
        """Int32 token ids of a prompt."""
        prompt = self.prompts[index]
        data = b"".join(self._tokens[block] for block in prompt.blocks.tolist())
        return np.concatenate([np.frombuffer(data, np.int32), prompt.rest])

    def _note_break(self, index: int) -> None:
        """Count a prompt that leaves a known prefix."""
        prompt = self.prompts[index]
        block = prompt.num_known
        place = int(prompt.blocks[block - 1]) if block else 0
        other = self._continued[place]
        if other in (-1, index):  # it goes on where earlier prompts ended
            return
        found = self._breaks.get(place)
        if found is None:
            mine, theirs = (
                np.frombuffer(self._tokens[self.prompts[i].blocks[block]], np.int32)
                for i in (index, other)
            )
            token = block * self.block_size + int(np.flatnonzero(mine != theirs)[0])
            found = self._breaks[place] = Break(block, token, index, other)
        found.num_prompts += 1
        if found.compared < MAX_COMPARED:
            after = (block + 1) * self.block_size
            equal = _num_equal(
                self.tokens_of(index)[after:],
                self.tokens_of(found.other)[found.token + 1 :],
                self.block_size,
            )
            found.compared += 1
            found.equal_after += (equal - found.equal_after) / found.compared

    def breaks(self) -> list[Break]:
        """Places where a prefix breaks although later tokens are equal, most such tokens first."""
        found = [one for one in self._breaks.values() if one.equal_after >= self.block_size]
        return sorted(found, key=lambda one: -one.equal_after * one.num_prompts)

    def depth_first_order(self) -> list[int] | None:
        """Indices of the prompts in the depth-first order of their prefix forest, in which prompts
        with a common prefix are neighbours; None if there are too many to sort.
        """
        counts = np.array([len(prompt.blocks) for prompt in self.prompts], np.int32)
        width = max(1, int(counts.max(initial=0)))
        if len(counts) * width > MAX_ENTRIES:
            return None
        table = np.zeros((len(counts), width), np.int32)
        for row, prompt in zip(table, self.prompts, strict=True):
            row[: len(prompt.blocks)] = prompt.blocks
        return forest_from_blocks(table, counts, self.block_size).request_rows.tolist()


def _num_equal(tokens: IntArray, others: IntArray, width: int) -> int:
    """Tokens of ``tokens``, in pieces of ``width`` from its start on, that are in ``others`` at any
    place.
    """
    if min(len(tokens), len(others)) < width:
        return 0
    found = np.isin(_hashes(tokens, width)[::width], _hashes(others, width))
    return int(found.sum()) * width


def _hashes(tokens: IntArray, width: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of the ``width`` tokens from each place on: a polynomial, of which running sums
    give each window's part.
    """
    powers = np.cumprod(np.full(len(tokens), HASH_BASE, np.uint64))
    sums = np.cumsum((tokens.astype(np.uint64) + 1) * powers)
    sums[width:] -= sums[:-width].copy()
    inverse = np.uint64(pow(HASH_BASE, -1, 1 << 64))
    return sums[width - 1 :] * np.cumprod(np.full(len(tokens) - width + 1, inverse))
