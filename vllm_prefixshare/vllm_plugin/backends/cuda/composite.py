"""PREFIX_SHARE in vLLM's composite of two backends, for models whose image tokens attend to later
tokens.

vLLM routes each step: to TRITON_ATTN, which has masks for images, if a query token is part of an
image, else to PREFIX_SHARE. Both use the same KV cache. Only releases with
``vllm.v1.attention.backends.composite`` can import this module.
"""

from typing import Any

from vllm.v1.attention.backends.composite import (
    MMPrefixAttentionRouting,
    create_composite_attention_backend,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.triton_flash_attn import TritonFlashAttentionBackend

from vllm_prefixshare.vllm_plugin import BACKEND_NAME
from vllm_prefixshare.vllm_plugin.backends.cuda.backend import PrefixShareCUDABackend
from vllm_prefixshare.vllm_plugin.eligibility.fallback import fall_back

_NAME = "PrefixShareCompositeBackend"
_Composite: Any = create_composite_attention_backend(
    TritonAttentionBackend,
    PrefixShareCUDABackend,
    name=_NAME,
    backend_name=BACKEND_NAME,
    module=__name__,
    routing_policy=MMPrefixAttentionRouting,
)


class PrefixShareCompositeImpl(_Composite.get_impl_cls()):  # type: ignore[misc]
    """One layer: ``general_impl`` is TRITON_ATTN's, ``causal_impl`` this package's."""

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """As ``PrefixShareCUDAImpl.do_kv_cache_update``, which makes values finite: decodes of
        other requests may read a block that a step with images has written.
        """
        self.causal_impl.do_kv_cache_update(*args, **kwargs)


class PrefixShareCompositeBuilder(_Composite.get_builder_cls()):  # type: ignore[misc]
    """Has a builder for each of the two backends, and calls that of the step's route."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        builder = self.causal_builder
        if type(self) is not PrefixShareCompositeBuilder and builder.executor is not None:
            # vLLM derives classes that change the runner's metadata before they build
            fall_back(f"metadata of {type(self).__name__}")
            builder.executor = builder.planner = None

    def after_wake_up(self, tags: list[str] | None) -> None:
        """As ``PlanningBuilder.after_wake_up``, called by a vLLM with ``patches/``."""
        self.causal_builder.after_wake_up(tags)


class PrefixShareCompositeBackend(_Composite):  # type: ignore[misc, no-any-unimported]
    """TRITON_ATTN for steps with images, PREFIX_SHARE for all others."""

    # as PrefixShareCUDABackend: do_kv_cache_update makes values finite
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The class of a layer."""
        return PrefixShareCompositeImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The class that builds the metadata of a step."""
        return PrefixShareCompositeBuilder

    @classmethod
    def kv_layout_owner(cls) -> type[Any]:
        """The backend that vLLM prefers for such layers on Hopper GPUs, with the same KV-cache
        layout.
        """
        return TritonFlashAttentionBackend
