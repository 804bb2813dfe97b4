"""``PrefixShareBackend``: the backend class of the platform that vLLM runs on.

A vLLM with ``patches/`` names it in its registry, which holds one path for all platforms.
"""

import importlib
from typing import Any, ClassVar

from vllm_prefixshare.config import FP8_CACHES
from vllm_prefixshare.vllm_plugin import (
    BACKEND_NAME,
    CPU_BACKEND,
    CUDA_BACKEND,
    FP8_MLA_BACKEND,
    MLA_BACKEND,
)
from vllm_prefixshare.vllm_plugin.eligibility.fallback import declines, fall_back
from vllm_prefixshare.vllm_plugin.observability.stats import take_stats


class BackendMethods:
    """The methods that are the same in the backend classes of both platforms.

    on_gpu: whether the platform is a GPU.
    impl_cls, builder_cls: the classes of a layer and of its metadata builder.
    """

    on_gpu: ClassVar[bool]
    impl_cls: ClassVar[type[Any]]
    builder_cls: ClassVar[type[Any]]

    @staticmethod
    def get_name() -> str:
        """The name of the backend's enum member."""
        return BACKEND_NAME

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        """The class of a layer."""
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """The class that builds the metadata of a step."""
        return cls.builder_cls

    @classmethod
    def kv_layout_owner(cls) -> type[Any]:
        """The backend of vLLM that this one derives from, and whose KV-cache layout it uses. A hook
        and a vLLM with the patches of patches/ ask for it.
        """
        return next(base for base in cls.__mro__ if not issubclass(base, BackendMethods))

    # asked by a vLLM with the patches of patches/

    @classmethod
    def decline_layer(cls, attn_selector_config: Any) -> str | None:
        """Why a layer keeps vLLM's own backend; None if it is served."""
        return declines(attn_selector_config, cls.on_gpu)

    @classmethod
    def choose_mla_class(cls, own: str, attn_selector_config: Any) -> str:
        """The class of an MLA layer where vLLM would take ``own``."""
        return latent_backend(own, attn_selector_config)

    @classmethod
    def take_stats(cls) -> dict[str, float]:
        """What this process counted since the last call."""
        return take_stats()


def latent_backend(own: str, layer: Any) -> str:
    """The backend of an MLA layer: ours where vLLM would take FLASH_ATTN_MLA, or FLASHMLA for an
    fp8 cache.

    Args:
        own: path of the class that vLLM would take.
        layer: its ``AttentionSelectorConfig``.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    parent, ours = AttentionBackendEnum.FLASH_ATTN_MLA, MLA_BACKEND
    if layer.kv_cache_dtype in FP8_CACHES:
        parent, ours = AttentionBackendEnum.FLASHMLA, FP8_MLA_BACKEND
    if own == parent.get_path():
        return ours
    fall_back(f"multi-head latent attention in {own.rpartition('.')[2]}")
    return own


def __getattr__(name: str) -> Any:
    if name != "PrefixShareBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    path = CPU_BACKEND if current_platform.is_cpu() else CUDA_BACKEND
    module, _, cls = path.rpartition(".")
    return getattr(importlib.import_module(module), cls)
