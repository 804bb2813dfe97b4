"""The logger of the plugin, under vLLM's."""

from typing import Any


def logger() -> Any:
    """``vllm.prefixshare``, made by vLLM, with its ``info_once`` and ``warning_once``."""
    from vllm.logger import init_logger

    return init_logger("vllm.prefixshare")
