"""Whether a vLLM has the patches of ``patches/``, found by their symbols.

Each function takes the module that a hook changes and says whether a patch does the hook's work:
then the hook is not installed.
"""

from types import ModuleType


def knows_our_variables(envs: ModuleType) -> bool:
    """Whether ``vllm.envs`` accepts this plugin's variables."""
    return "VLLM_PREFIXSHARE_" in getattr(envs, "PLUGIN_PREFIXES", ())


def lets_backends_decline(platforms_cuda: ModuleType) -> bool:
    """Whether a CUDA backend can decline a layer."""
    return hasattr(platforms_cuda.CudaPlatformBase, "backend_for_layer")


def lets_cpu_backends_be_selected(platforms_cpu: ModuleType) -> bool:
    """Whether a CPU backend can be selected, and decline a layer."""
    return hasattr(platforms_cpu.CpuPlatform, "backend_for_layer") and hasattr(
        platforms_cpu, "_serves_cpus"
    )


def carries_host_tables(_: ModuleType) -> bool:
    # imported by the module that the hook changes
    """Whether the metadata of a batch carries the host's block table."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    return hasattr(CommonAttentionMetadata, "block_table_cpu")


def starts_streams_at_a_tail(detokenizer: ModuleType) -> bool:
    """Whether the decode stream starts from the end of the prompt."""
    return hasattr(detokenizer, "find_stream_start")


def looks_up_without_calls(_: ModuleType) -> bool:
    """Whether cached blocks are looked up and counted without a call per block."""
    from vllm.v1.core.block_pool import BlockPool

    return hasattr(BlockPool, "get_leading_cached_blocks")


def stages_arrays(buffer_utils: ModuleType) -> bool:
    """Whether staged writes keep arrays."""
    return hasattr(buffer_utils, "StagedContents")


def tells_builders_of_wake_up(_: ModuleType) -> bool:
    """Whether metadata builders are told when a worker wakes up."""
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    return hasattr(AttentionMetadataBuilder, "after_wake_up")
