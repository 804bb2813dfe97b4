"""Takes the block hashes of a prompt from a recent prompt with the same prefix.

vLLM chains the hashes: the hash of a block is a function of the hash before it, the block's tokens
(with `num_hash_lookahead_tokens`, also of the next tokens) and its extra keys: LoRA adapter,
multi-modal features that overlap those tokens with offsets relative to the block, and for the
first block the cache salt.

`_Segment` has the hashes of consecutive blocks and the inputs they were computed from. A segment
is found by the arguments of its first hash: the preceding hash (by value), the first block's tokens
and its extra keys. From there a prompt gets the segment's hashes while its tokens and features are
the same. vLLM's own function has therefore computed each of these hashes from equal arguments, with
any algorithm, even one with collisions. Where a prompt differs from a segment, the look-up
continues from the last equal block, so segments form a prefix tree with edges keyed by content: a
dropped segment is found again once it has been computed again. vLLM's hasher continues from the
last block that was found.

Left to vLLM: prompts with embeddings, features that overlap each other (what vLLM then hashes
depends on features behind the block), token ids that are not plain ints of 32 bits (their pickled
form differs from the form of an equal int), and blocks completed by output tokens.
"""

import functools
import sys
from collections.abc import Callable
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash

from vllm_prefixshare.vllm_plugin.prompts.bounded_cache import BoundedCache, part_limit
from vllm_prefixshare.vllm_plugin.prompts.known_code import is_known
from vllm_prefixshare.vllm_plugin.prompts.parts import is_enabled, measured
from vllm_prefixshare.vllm_plugin.prompts.token_ids import (
    TokenArray,
    TokenIds,
    as_array,
    num_common_ids,
)

if TYPE_CHECKING:  # its module imports the one that is hooked
    from vllm.v1.request import Request

PART = "hashes"
#: Minimum number of new blocks to store: hashing fewer again takes 20 microseconds.
MIN_BLOCKS = 8
#: Estimate of the bytes that a multi-modal feature takes in a segment.
_FEATURE_BYTES = 300

BlockHasher = Callable[["Request"], list[BlockHash]]


class _Feature(NamedTuple):
    """A multi-modal input: its identifier, its start and its end (exclusive), in tokens."""

    identifier: str
    start: int
    end: int


class _Segment(NamedTuple):
    """Hashes of consecutive blocks, and the inputs they were computed from.

    tokens: int32 [blocks * block_size + look-ahead].
    features: the features that overlap ``tokens``, relative to its start.
    hashes: [blocks].
    """

    tokens: TokenArray
    features: tuple[_Feature, ...]
    hashes: list[BlockHash]


class _Prompt(NamedTuple):
    """The inputs of a prompt's hashes. tokens: int32 [prompt length]."""

    tokens: TokenArray
    features: list[_Feature]
    lora: tuple[str, str] | None
    salt: str | None

    def features_between(self, start: int, end: int) -> tuple[_Feature, ...]:
        """The features that overlap tokens ``start`` to ``end``, relative to ``start``."""
        return tuple(
            _Feature(f.identifier, f.start - start, f.end - start)
            for f in self.features
            if f.start < end and f.end > start
        )


@functools.cache
def _segments() -> BoundedCache[Any, _Segment]:
    """The segments of this process."""
    return BoundedCache(part_limit(PART))


class SharedBlockHasher:
    """A vLLM block hasher that takes hashes from recent prompts.

    Args:
        baseline: vLLM's hasher, made with the following arguments.
        block_size: tokens per hash.
        hash_function: the algorithm.
        num_lookahead_tokens: tokens after a block that its hash covers.
    """

    def __init__(
        self,
        baseline: BlockHasher,
        block_size: int,
        hash_function: Callable[[Any], bytes],
        num_lookahead_tokens: int = 0,
    ) -> None:
        self._baseline = baseline
        self._block_size = block_size
        self._lookahead = num_lookahead_tokens
        self._identity = (hash_function, block_size, num_lookahead_tokens)

    def __call__(self, request: "Request") -> list[BlockHash]:
        """The missing hashes of the request's full blocks."""
        if request.block_hashes or not is_enabled(PART):
            return self._baseline(request)
        num_blocks = (request.num_tokens - self._lookahead) // self._block_size
        if num_blocks < MIN_BLOCKS or not _is_supported():
            return self._baseline(request)
        with measured(PART) as counters:
            counters.units += num_blocks
            prompt = _read(request)
            if prompt is None:
                counters.fallbacks += 1
                return self._baseline(request)
            shared = self._find(prompt, num_blocks)
            if not _can_resume(prompt, len(shared) * self._block_size):
                shared = []
            counters.shared_units += len(shared)
            new = self._continue(request, shared)
            self._keep(prompt, shared, new)
            counters.cache_bytes = _segments().bytes
            return shared + new

    def _find(self, prompt: _Prompt, num_blocks: int) -> list[BlockHash]:
        """The hashes of the leading blocks that recent prompts have."""
        hashes: list[BlockHash] = []
        while len(hashes) < num_blocks:
            segment = _segments().get(self._key(prompt, hashes))
            if segment is None:
                break
            # at least one block: the key has all inputs of the first hash
            common = self._num_common_tokens(prompt, len(hashes) * self._block_size, segment)
            hashes += segment.hashes[: (common - self._lookahead) // self._block_size]
        return hashes

    def _key(self, prompt: _Prompt, hashes: list[BlockHash]) -> tuple[Any, ...]:
        """The arguments of the hash that follows ``hashes``."""
        start = len(hashes) * self._block_size
        end = start + self._block_size + self._lookahead
        return (
            self._identity,
            hashes[-1] if hashes else kv_cache_utils.NONE_HASH,
            None if hashes else (prompt.salt,),
            prompt.lora,
            prompt.features_between(start, end) if prompt.features else (),
            prompt.tokens[start:end].tobytes(),
        )

    def _num_common_tokens(self, prompt: _Prompt, start: int, segment: _Segment) -> int:
        """Number of tokens from ``start`` that equal the segment's, with the same features."""
        common = num_common_ids(prompt.tokens[start:], segment.tokens)
        if prompt.features or segment.features:
            features = prompt.features_between(start, start + common)
            for pair in zip_longest(features, segment.features):
                if pair[0] != pair[1]:
                    return min(common, *(feature.start for feature in pair if feature))
        return common

    def _continue(self, request: "Request", shared: list[BlockHash]) -> list[BlockHash]:
        """The hashes after ``shared``, by vLLM's hasher."""
        request.block_hashes.extend(shared)
        try:
            return self._baseline(request)
        finally:
            request.block_hashes.clear()  # the caller extends it by the result

    def _keep(self, prompt: _Prompt, shared: list[BlockHash], new: list[BlockHash]) -> None:
        """Store the new hashes for later prompts."""
        if len(new) < MIN_BLOCKS:
            return
        start = len(shared) * self._block_size
        end = start + len(new) * self._block_size + self._lookahead
        # a copy: a view would keep the whole prompt or its message alive
        tokens = prompt.tokens[start:end].copy()
        segment = _Segment(tokens, prompt.features_between(start, end), new)
        key = self._key(prompt, shared)
        num_bytes = tokens.nbytes + len(key[-1]) + _FEATURE_BYTES * len(segment.features)
        num_bytes += len(new) * (sys.getsizeof(new[0]) + 8)
        _segments().put(key, segment, num_bytes)


def _read(request: "Request") -> _Prompt | None:
    """The request's prompt, or None if its hashes depend on more."""
    ids = request.prompt_token_ids
    if ids is None or len(ids) != request.num_tokens or request.prompt_embeds is not None:
        return None
    features = [
        _Feature(f.identifier, f.mm_position.offset, f.mm_position.offset + f.mm_position.length)
        for f in request.mm_features
    ]
    if any(after.start < before.end for before, after in pairwise(features)):
        return None
    if not isinstance(ids, TokenIds) and set(map(type, ids)) != {int}:
        return None
    try:
        tokens = as_array(ids)
    except OverflowError:
        return None
    lora = request.lora_request
    adapter = (lora.lora_name, lora.lora_path) if lora else None
    return _Prompt(tokens, features, adapter, request.cache_salt)


def _can_resume(prompt: _Prompt, start: int) -> bool:
    """Whether vLLM's hasher can start at token ``start``. Before 0.31 it assumes that at most the
    last feature comes after it.
    """
    return (
        len(prompt.features) < 2
        or prompt.features[-2].end <= start
        or start == 0
        or hasattr(kv_cache_utils, "get_mm_features_in_window")
    )


_UTILS = "vllm.v1.core.kv_cache_utils"
#: Functions that a hash depends on, in vLLM 0.29 to 0.33.
KNOWN_CODE = {
    f"{_UTILS}.hash_block_tokens": ("1f0474c5df2e",),
    f"{_UTILS}.generate_block_hash_extra_keys": (
        "097d746f2032",
        "b8ef1656a291",
    ),
    f"{_UTILS}._gen_mm_extra_hash_keys": (
        "60501fad8c0f",
        "22a4e59b1528",
    ),
    f"{_UTILS}._gen_lora_extra_hash_keys": (
        "d5050347849a",
        "84f0000dcc23",
    ),
    f"{_UTILS}.get_request_block_hasher": (
        "3619baf784ab",
        "0f13cb733a40",
        "fcb418499da1",
        # with the patch block-hasher-wrappers: 0.29, 0.32 and 0.33
        "cee8c7dc1a13",
        "73022f7f9399",
        "c1d4e8677b9c",
    ),
}


@functools.cache
def _is_supported() -> bool:
    return is_known(PART, KNOWN_CODE)
