"""Which layers are served. The others keep vLLM's own backend, each with a reason in the log.

``layer`` describes layers and engines, ``rules`` has the ordered list of reasons, ``platform`` what
a machine can serve, ``measured`` what depends on the GPU and its kernels, and ``groups`` which
layers share one plan.
"""
