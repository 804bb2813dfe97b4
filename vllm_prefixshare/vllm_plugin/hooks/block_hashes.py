"""Hooks on the engine core's block hashes and prefix-cache look-up.

Whether a part is active is asked at each call: an engine may be built before the process learns of
its attention backend.
"""

from types import ModuleType
from typing import Any

from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, Hook, extend, wrap


def hook_block_hasher(module: ModuleType) -> None:
    """Take block hashes from recent prompts."""
    from vllm.v1.core import kv_cache_utils

    from vllm_prefixshare.vllm_plugin.prompts.block_hashes import SharedBlockHasher

    if extend(kv_cache_utils, "block_hasher_wrappers", SharedBlockHasher):
        return

    def wrapper(original: Function) -> Function:
        def get_request_block_hasher(*args: Any, **kwargs: Any) -> SharedBlockHasher:
            return SharedBlockHasher(original(*args, **kwargs), *args, **kwargs)

        return get_request_block_hasher

    wrap(module, "get_request_block_hasher", wrapper)


def hook_block_pool(module: ModuleType) -> None:
    """Count users of shared blocks in a short loop."""
    from vllm_prefixshare.vllm_plugin.prompts import block_lookup

    wrap(module.BlockPool, "touch", _while_active(block_lookup.touch))
    wrap(module.BlockPool, "free_blocks", _while_active(block_lookup.free_blocks))


def hook_look_up(module: ModuleType) -> None:
    """Look up full-attention blocks, and count evictable ones, without a call per block."""
    from vllm_prefixshare.vllm_plugin.prompts import block_lookup

    find = _while_active(block_lookup.find_longest_cache_hit)
    count = _while_active(block_lookup.num_evictable_blocks)
    wrap(module.FullAttentionManager, "find_longest_cache_hit", find)
    wrap(module.SingleTypeKVCacheManager, "_get_num_evictable_blocks", count)


def hook_estimate(module: ModuleType) -> None:
    """Estimate a request's cached tokens without a call per block."""
    from vllm_prefixshare.vllm_plugin.prompts import block_lookup

    estimate = _while_active(block_lookup.estimate_cached_tokens)
    wrap(module.KVCacheManager, "estimate_cached_tokens", estimate)


def _while_active(function: Function) -> Function:
    """Wrapper that calls ``function`` with the original and its arguments while the look-up is
    shared, and the original otherwise.
    """
    from vllm_prefixshare.vllm_plugin.prompts.block_lookup import is_active

    def wrapper(original: Function) -> Function:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if is_active():
                return function(original, *args, **kwargs)
            return original(*args, **kwargs)

        return wrapped

    return wrapper


HOOKS = (
    *(
        Hook(
            module,
            "get_request_block_hasher",
            "vLLM hashes every block of a prompt again for each request",
            "vLLM takes the hashes of a prefix from recent requests",
            hook_block_hasher,
            parts=("hashes",),
        )
        # the engine core may have imported the name before
        for module in ("vllm.v1.core.kv_cache_utils", "vllm.v1.engine.core")
    ),
    *(
        Hook(
            f"vllm.v1.core.{module}",
            name,
            "vLLM makes Python calls per cached block for each request",
            "vLLM handles cached blocks without a call per block",
            install,
            parts=("lookup",),
            switch="vllm.v1.core.block_pool:BlockPool.inlines_loops",
        )
        for module, name, install in (
            ("block_pool", "BlockPool", hook_block_pool),
            (
                "single_type_kv_cache_manager",
                "FullAttentionManager.find_longest_cache_hit",
                hook_look_up,
            ),
            ("kv_cache_manager", "KVCacheManager.estimate_cached_tokens", hook_estimate),
        )
    ),
)
