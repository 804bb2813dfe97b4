"""The program ``vllm-prefixshare``: a module for each command, put together by ``main``.

Each module has ``add_arguments(parser)`` and ``run(args) -> exit status``.
"""
