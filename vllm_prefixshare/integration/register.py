"""Entry point of the plugin group ``vllm.general_plugins``."""

import os

from vllm_prefixshare.records import PrefixShareError


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once.

    A vLLM version that is not supported, or a part of it that cannot be imported here, is an
    error only for those who chose the backend.

    Raises:
        PrefixShareError: the backend is chosen, but cannot be had.
    """
    from vllm_prefixshare.integration import compat, hooks

    try:
        compat.check_vllm_version()
        hooks.install_hooks()
    except PrefixShareError as e:
        if os.environ.get(hooks.ENV_VAR, "").upper() == hooks.BACKEND_NAME:
            hooks.refuse(e)
        hooks.logger().warning("%s", e)
