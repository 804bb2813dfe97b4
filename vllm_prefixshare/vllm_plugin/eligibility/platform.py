"""Features of layers that a machine can serve."""

from typing import NamedTuple

from vllm_prefixshare.config import DTYPES, MAX_HEAD_DIM
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import compat, invariance

#: Dtypes of the GPU kernels.
CUDA_DTYPES = ("bfloat16", "float16")
#: Maximum head_dim without the experimental ``head_dim``.
USUAL_HEAD_DIM = 256
#: Optional features of layers that GPUs serve. CPUs serve none of them.
GPU_EXTRAS = frozenset(
    {"dcp", "fp8", "invariance", "mla", "mla_fp8", "mm_prefix", "sinks", "softcap", "windows"}
)
NOTHING: frozenset[str] = frozenset()


class Platform(NamedTuple):
    """What a machine can serve.

    dtypes: dtypes of the executors. extras: the served features of ``GPU_EXTRAS`` and
    ``settings.EXPERIMENTAL``. is_gpu: whether the rules for GPUs apply. is_here: whether it is this
    machine, so that its kernels and cost table decide as well.
    """

    dtypes: tuple[str, ...]
    extras: frozenset[str] = NOTHING
    is_gpu: bool = True
    is_here: bool = False

    @property
    def max_head_dim(self) -> int:
        """The largest head_dim that is served."""
        return MAX_HEAD_DIM if "head_dim" in self.extras else USUAL_HEAD_DIM

    def fp8_extra(self, use_mla: bool) -> bool:
        """Whether KV caches (with ``use_mla``, MLA caches) may have 8 bits."""
        return ("mla_fp8" if use_mla else "fp8") in self.extras


CPU = Platform(DTYPES, is_gpu=False)


def gpu_extras(anywhere: bool = False) -> frozenset[str]:
    """Features that layers may have on this GPU. vLLM's own backends compute prefills: sinks and
    fp8 caches need support by FLASH_ATTN, MLA by FLASH_ATTN_MLA, and an fp8 MLA cache by FLASHMLA.
    Batch invariance and image tokens that attend to later ones need support by this vLLM.

    Args:
        anywhere: return the features on a GPU that supports everything.
    """
    extras = GPU_EXTRAS | settings().experimental
    if not compat.can_combine_backends():
        extras -= {"mm_prefix"}
    if anywhere:
        return extras
    from vllm.v1.attention.backends.fa_utils import flash_attn_supports_mla
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.ops.flashmla import is_flashmla_dense_supported

    takes = {
        "mla": flash_attn_supports_mla(),
        "mla_fp8": is_flashmla_dense_supported()[0],
        "sinks": FlashAttentionBackend.supports_sink(),
        "fp8": FlashAttentionBackend.supports_kv_cache_dtype("fp8"),
        "invariance": not invariance.wanted() or invariance.is_possible(),
    }
    return extras - {name for name, there in takes.items() if not there}


def gpu_of(capability: tuple[int, int]) -> Platform:
    """A GPU that this machine may not have, by its compute capability."""
    extras = gpu_extras(anywhere=True)
    # FlashAttention-3 and 4 support these; vLLM uses them on compute capability 9.0 and 10.0
    if capability not in ((9, 0), (10, 0)):
        extras -= {"fp8", "mla_fp8", "sinks"}
    if capability != (9, 0):
        extras -= {"mla", "mla_fp8"}
    return Platform(CUDA_DTYPES, extras)
