"""The plugin: the only place that imports vllm.

``register`` holds the entry points. ``hooks`` lists every change made to vLLM at run time,
``signatures`` what they rely on in its source, ``compat`` which releases are known and what differs
between them, ``eligibility`` which layers are served, ``invariance`` what batch invariance changes.
``cuda`` is the attention backend on NVIDIA GPUs, ``cuda.mla`` and ``cuda.mla_fp8`` those of latent
attention, and ``host_tables`` has their block tables on the host; ``cpu`` is the backend of the CPU
platform; ``backend`` is one class name for all platforms. ``planner`` plans each backend's steps,
``precompiling`` compiles while an engine starts, ``order`` orders waiting requests, ``stats``
counts, ``metrics`` and ``ray_metrics`` publish the counters of ``metric_sources`` in
``metric_files``, ``tracing`` records batches.
"""

BACKEND_NAME = "PREFIX_SHARE"
CPU_BACKEND = "vllm_prefixshare.vllm_plugin.backends.cpu.backend.PrefixShareCPUBackend"
CUDA_BACKEND = "vllm_prefixshare.vllm_plugin.backends.cuda.backend.PrefixShareCUDABackend"
MLA_BACKEND = "vllm_prefixshare.vllm_plugin.backends.mla.unquantized.PrefixShareMLABackend"
FP8_MLA_BACKEND = "vllm_prefixshare.vllm_plugin.backends.mla.fp8.PrefixShareFP8MLABackend"
