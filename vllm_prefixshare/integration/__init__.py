"""The plugin: the only place that imports vllm.

``register`` is the entry point, ``hooks`` lists every change made to vLLM, ``compat`` knows
the versions, ``support`` what is not served. ``cuda`` is the attention backend on NVIDIA GPUs,
``host_tables`` its block tables; ``cpu`` is that of the CPU platform.
"""
