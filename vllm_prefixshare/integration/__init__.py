"""The plugin: the only place that imports vllm.

``register`` is the entry point, ``hooks`` lists every change made to vLLM, ``compat`` knows
the versions, ``cpu`` is the attention backend of the CPU platform.
"""
