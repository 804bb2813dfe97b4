"""Which layers are served. The others keep vLLM's own backend, each with a reason in the log.

``layer`` holds what decides, ``rules`` the ordered list of reasons, ``platform`` what a machine can
serve, ``measured`` what needs the GPU and its kernels, ``groups`` the layers that share one plan.
"""
