"""The plugin: the only place that imports vllm.

``register`` holds the entry points, ``hooks/`` every change made to vLLM at run time,
``signatures`` what they rely on in its source, and ``compat`` which releases are known and what
differs between them. ``eligibility/`` decides which layers are served, ``backends/`` has the
attention backends, ``step/`` plans their steps, ``prompts/`` the shared host work, ``scheduling/``
the order of waiting requests and ``observability/`` counters, metrics and traces.
"""

BACKEND_NAME = "PREFIX_SHARE"
CPU_BACKEND = "vllm_prefixshare.vllm_plugin.backends.cpu.backend.PrefixShareCPUBackend"
CUDA_BACKEND = "vllm_prefixshare.vllm_plugin.backends.cuda.backend.PrefixShareCUDABackend"
COMPOSITE_BACKEND = (
    "vllm_prefixshare.vllm_plugin.backends.cuda.composite.PrefixShareCompositeBackend"
)
MLA_BACKEND = "vllm_prefixshare.vllm_plugin.backends.mla.unquantized.PrefixShareMLABackend"
FP8_MLA_BACKEND = "vllm_prefixshare.vllm_plugin.backends.mla.fp8.PrefixShareFP8MLABackend"
