"""Entry point of the plugin group ``vllm.general_plugins``."""

import os

from vllm_prefixshare.types import PrefixShareError


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once.

    On a vLLM version that is not supported nothing is changed; that is an error only for
    those who chose the backend.

    Raises:
        PrefixShareError: the backend is chosen, but this vLLM is not supported.
    """
    from vllm_prefixshare.integration import compat, hooks

    try:
        compat.check_vllm_version()
    except PrefixShareError as e:
        if os.environ.get(hooks.ENV_VAR, "").upper() == hooks.BACKEND_NAME:
            hooks.refuse(e)
        hooks.logger().warning("%s", e)
        return
    hooks.install_hooks()
