"""The command ``vllm-prefixshare``: a module for each of its commands, which ``main`` puts
together. Each has ``add_arguments(parser)`` and ``run(args) -> exit status``."""
