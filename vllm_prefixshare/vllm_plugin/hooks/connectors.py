"""Hook on a connector that compares backends by name, though their KV caches are alike."""

from types import ModuleType
from typing import Any

from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, Hook, wrap


def hook_nixl(module: ModuleType) -> None:
    """Report the backends whose KV-cache layout is used in place of the backends of this package,
    so that either instance of a pair may have them. NIXL hashes the names, and by them also decides
    how a CPU reorders blocks that it receives.
    """

    def wrapper(original: Function) -> Function:
        def get_current_attn_backends(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            # layers that are not served have the same owner
            return list(dict.fromkeys(_owner(backend) for backend in found))

        return get_current_attn_backends

    wrap(module, "get_current_attn_backends", wrapper)


def _owner(backend: Any) -> Any:
    find = getattr(backend, "kv_layout_owner", None)
    return backend if find is None else find()


HOOKS = (
    Hook(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker",
        "get_current_attn_backends",
        "NIXL's compatibility hash has the names of backends, so that instances with equal "
        "KV caches reject each other",
        "the hash describes the layout, or a backend can name the owner of its layout",
        hook_nixl,
        ("vllm.v1.attention.backend:AttentionBackend.kv_layout_owner",),
    ),
)
