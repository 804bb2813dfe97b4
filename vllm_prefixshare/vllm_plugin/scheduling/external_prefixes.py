"""Requests on one prefix that a KV connector holds: one loads it, the others use its blocks."""

from typing import Any

from vllm.v1.request import RequestStatus

from vllm_prefixshare.vllm_plugin.scheduling.prefix_queue import Request, num_shared_hashes


def hold_followers(connector: Any, hash_block_size: int) -> None:
    """Let a request wait while another one loads at least half of what it would load.

    A connector that loads while other requests run gives each request separate blocks, because
    blocks are cached once they are loaded (vLLM #44882).

    Args:
        connector: a scheduler's ``KVConnectorBase_V1``.
        hash_block_size: tokens of a block hash.
    """
    matched_by_connector = connector.get_num_new_matched_tokens
    loading: dict[str, Request] = {}

    def matched(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, is_async = matched_by_connector(request, num_computed_tokens)
        if not is_async or not num_tokens:
            return num_tokens, is_async
        for request_id, other in list(loading.items()):
            if other.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                del loading[request_id]
                continue
            num_shared = num_shared_hashes(request, other) * hash_block_size
            # while it loads, it counts what is loaded as computed
            num_loaded = min(num_shared, other.num_computed_tokens) - num_computed_tokens
            if 2 * num_loaded >= num_tokens:
                return None, False  # the scheduler asks again in the next step
        loading[request.request_id] = request
        return num_tokens, is_async

    connector.get_num_new_matched_tokens = matched
