"""The plugin: the only place that imports vllm.

``register`` holds the entry points. ``hooks`` lists every change made to vLLM at run time,
``signatures`` what they rely on in its source, ``compat`` which releases are known and what differs
between them, ``support`` which layers are served, ``invariance`` what batch invariance changes.
``cuda`` is the attention backend on NVIDIA GPUs, ``cuda.mla`` that of latent attention,
``host_tables`` their block tables on the host; ``cpu`` is the backend of the CPU platform;
``backend`` is one name for all.
"""

BACKEND_NAME = "PREFIX_SHARE"
CPU_BACKEND = "vllm_prefixshare.integration.cpu.backend.PrefixShareCPUBackend"
CUDA_BACKEND = "vllm_prefixshare.integration.cuda.backend.PrefixShareCUDABackend"
MLA_BACKEND = "vllm_prefixshare.integration.cuda.mla.PrefixShareMLABackend"
