"""Prefix-cache look-up and reference counts without a Python call per block.

Like vLLM's functions, each function here reads the state of every block at the time of the call,
so evictions, resets and duplicates need no special care. Only the cost changes: vLLM makes three
calls per block of a look-up and tests each block for the rare cases first.

`find_longest_cache_hit`
    makes vLLM's probes of the same dictionary in list comprehensions over growing ranges of
    blocks, and stops at the first range with a miss. A recent look-up is stored as the keys of its
    probes, which depend only on the hashes, and the blocks it found: if the probes find the same
    objects again, their types need not be checked.
`touch`, `free_blocks`
    update the reference count of blocks that other requests hold before and after the call, for
    which vLLM only adds or subtracts one. All other blocks go to vLLM's code, in their order. A
    null block has a count of 0 (from 0.33 on) and goes there, or vLLM counts it like any other.
`num_evictable_blocks`, `estimate_cached_tokens`
    are vLLM's expressions as comprehensions.

Left to vLLM: hash lists that are not lists, hits that end inside a block (``alignment_tokens``
below the block size), and pools with their own ``get_cached_block``.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

from vllm_prefixshare.vllm_plugin.prompts.bounded_cache import BoundedCache, part_limit
from vllm_prefixshare.vllm_plugin.prompts.known_code import is_known
from vllm_prefixshare.vllm_plugin.prompts.parts import is_enabled, measured

if TYPE_CHECKING:  # these modules import the ones that are hooked
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

PART = "lookup"
#: Number of blocks in the first range of a look-up; each further range has twice as many.
_FIRST_RANGE = 16
#: The number of stored leading blocks is a multiple of this, so that prompts on one document share
#: them.
_STORED_STEP = 64
#: Estimated bytes of a stored block: its key and three list elements.
_BYTES_PER_BLOCK = 96

_NUM_TOKENS = attrgetter("_block_hash_num_tokens")

LookupResult = tuple[tuple[list[KVCacheBlock], ...], int]


def find_longest_cache_hit(
    baseline: Callable[..., LookupResult],
    cls: Any,
    block_hashes: Any,
    max_length: int,
    kv_cache_group_ids: list[int],
    block_pool: BlockPool,
    kv_cache_spec: Any,
    drop_eagle_block: bool,
    alignment_tokens: int,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
) -> LookupResult:
    """`FullAttentionManager.find_longest_cache_hit`.

    Args:
        baseline: vLLM's function; the other arguments are as in vLLM.

    Returns:
        The cached blocks of each group, and how many tokens they hold.
    """
    block_size = kv_cache_spec.block_size * max(dcp_world_size, 1)
    hashes_per_block, rest = divmod(block_size, block_pool.hash_block_size)
    with measured(PART) as counters:
        if (
            type(block_hashes) is not list
            or rest
            or (alignment_tokens < block_size and block_size % alignment_tokens == 0)
            or type(block_pool).get_cached_block is not BlockPool.get_cached_block
        ):
            counters.fallbacks += 1
            return baseline(
                cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec,
                drop_eagle_block, alignment_tokens, dcp_world_size, pcp_world_size,
            )  # fmt: skip
        # hashes are chained, so the last hash of a block identifies it
        hashes = block_hashes[hashes_per_block - 1 :: hashes_per_block]
        del hashes[max_length // block_size :]
        counters.units += len(hashes)
        hits: list[list[KVCacheBlock]] = []
        for group_id in kv_cache_group_ids:
            hits.append(_leading_hits(block_pool, hashes, group_id))
            del hashes[len(hits[-1]) :]
        counters.shared_units += len(hashes)
        counters.cache_bytes = _recent_lookups(block_pool).bytes
    hit_length = len(hashes) * block_size
    if drop_eagle_block and hit_length > 0:
        hit_length -= min(alignment_tokens, block_size)
    hit_length -= hit_length % alignment_tokens
    for blocks in hits:
        del blocks[-(-hit_length // block_size) :]
    return tuple(hits), hit_length


class _Recent(NamedTuple):
    """A look-up that found all of its leading blocks: hashes, keys and blocks."""

    hashes: list[BlockHash]
    keys: list[bytes]
    blocks: list[KVCacheBlock]


#: The attribute of a pool with its recent look-ups. Within a pool, equal blocks are identical.
_RECENT = "_prefixshare_recent"

_RecentCache = BoundedCache[tuple[int, BlockHash], _Recent]


def _leading_hits(
    block_pool: BlockPool, hashes: list[BlockHash], group_id: int
) -> list[KVCacheBlock]:
    """The cached blocks of a group up to the first hash without one."""
    get: Any = block_pool.cached_block_hash_to_block._cache.get
    suffix: Any = group_id.to_bytes(4, "big")
    leading = hashes[: len(hashes) // _STORED_STEP * _STORED_STEP]
    recent = _recent(block_pool, leading, group_id) if leading else None
    hits: list[KVCacheBlock] = []
    is_recent = False
    num_probed = 0
    if recent is not None:
        found = list(map(get, recent.keys))
        is_recent = found == recent.blocks
        hits = found if is_recent else _leading_blocks(found)
        num_probed = len(leading)
    size = _FIRST_RANGE
    while len(hits) == num_probed < len(hashes):
        found = [get(h + suffix) for h in hashes[num_probed : num_probed + size]]
        hits += _leading_blocks(found)
        num_probed += len(found)
        size *= 2
    if leading and not is_recent and len(hits) >= len(leading):
        keys = [h + suffix for h in leading] if recent is None else recent.keys
        entry = _Recent(leading, keys, hits[: len(leading)])
        size_bytes = len(leading) * _BYTES_PER_BLOCK
        _recent_lookups(block_pool).put((group_id, leading[-1]), entry, size_bytes)
    return hits


def _leading_blocks(found: list[Any]) -> list[KVCacheBlock]:
    """The blocks of entries of the pool's dictionary, up to the first that is None. Of duplicates
    the first one counts.
    """
    kinds = set(map(type, found))
    if dict in kinds:
        found = [next(iter(b.values())) if type(b) is dict else b for b in found]
    if type(None) in kinds:
        return found[: next(i for i, block in enumerate(found) if block is None)]
    return found


def _recent(block_pool: BlockPool, hashes: list[BlockHash], group_id: int) -> _Recent | None:
    """A recent look-up of these hashes, or None."""
    recent = _recent_lookups(block_pool).get((group_id, hashes[-1]))
    return recent if recent is not None and recent.hashes == hashes else None


def _recent_lookups(block_pool: BlockPool) -> _RecentCache:
    """The recent look-ups in a pool, by group and last hash."""
    cache: _RecentCache | None = getattr(block_pool, _RECENT, None)
    if cache is None:
        cache = BoundedCache(part_limit(PART))
        setattr(block_pool, _RECENT, cache)
    return cache


def touch(
    baseline: Callable[[BlockPool, Sequence[KVCacheBlock]], None],
    pool: BlockPool,
    blocks: Sequence[KVCacheBlock],
) -> None:
    """`BlockPool.touch`: add a user to each block."""
    if pool.metrics_collector:
        return baseline(pool, blocks)
    unused = []
    for block in blocks:
        count = block.ref_cnt
        if count:
            block.ref_cnt = count + 1
        else:
            unused.append(block)
    if unused:
        baseline(pool, unused)


def free_blocks(
    baseline: Callable[[BlockPool, Iterable[KVCacheBlock]], None],
    pool: BlockPool,
    ordered_blocks: Iterable[KVCacheBlock],
) -> None:
    """`BlockPool.free_blocks`: remove a user from each block."""
    unused = []
    for block in ordered_blocks:
        count = block.ref_cnt
        if count > 1:
            block.ref_cnt = count - 1
        else:
            unused.append(block)
    if unused:
        baseline(pool, unused)


def num_evictable_blocks(baseline: Any, cls: Any, blocks: Iterable[KVCacheBlock]) -> int:
    """`SingleTypeKVCacheManager._get_num_evictable_blocks`."""
    return len([1 for block in blocks if block.ref_cnt == 0 and not block.is_null])


def estimate_cached_tokens(baseline: Any, manager: "KVCacheManager", request: "Request") -> int:
    """`KVCacheManager.estimate_cached_tokens`: number of the request's tokens in the cache."""
    estimates = []
    groups = manager.kv_cache_config.kv_cache_groups
    blocks_by_group = manager.get_blocks(request.request_id).blocks
    for group, blocks in zip(groups, blocks_by_group, strict=False):
        spec = group.kv_cache_spec
        if isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec):
            continue
        if getattr(spec, "prefix_cacheable", True):  # 0.29 has no such attribute
            lengths = filter(None, map(_NUM_TOKENS, blocks))
            estimates.append(max(lengths, default=0))
    return min(estimates, default=0)


_POOL = "vllm.v1.core.block_pool"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
#: Functions that this module replaces or relies on, in vLLM 0.29 to 0.33.
KNOWN_CODE = {
    f"{_MANAGERS}.FullAttentionManager.find_longest_cache_hit": ("a76400908327",),
    f"{_MANAGERS}.SingleTypeKVCacheManager._get_num_evictable_blocks": ("ef47843baa10",),
    "vllm.v1.core.kv_cache_manager.KVCacheManager.estimate_cached_tokens": (
        "2d540ca57443",
        "43ea9591cb48",
    ),
    f"{_POOL}.BlockPool.get_cached_block": ("78bf4c5f7c2a",),
    f"{_POOL}.BlockHashToBlockMap.get_one_block": ("c3e780213a7f",),
    "vllm.v1.core.kv_cache_utils.make_block_hash_with_group_id": ("80832cb0c8ae",),
    "vllm.v1.core.kv_cache_utils.resolve_block_hashes": ("aa376b4a8549",),
    f"{_POOL}.BlockPool.touch": (
        "de2c8232ec96",
        "cda15b9ce61a",
    ),
    f"{_POOL}.BlockPool.free_blocks": (
        "708d989c83c4",
        "47cbbfa50063",
        "04c98a989529",
    ),
}


@functools.cache
def _is_supported() -> bool:
    return is_known(PART, KNOWN_CODE)


def is_active() -> bool:
    """Whether the part is enabled and supports this vLLM."""
    return is_enabled(PART) and _is_supported()
