"""The entry points that vLLM and PyTorch call. They install the hooks and import no vLLM module: a
hook waits until vLLM imports the module that it changes.
"""

import os


def register() -> None:
    """Entry point of ``vllm.general_plugins``: called in each process, possibly more than once."""
    from vllm_prefixshare.vllm_plugin.hooks.registry import install_hooks

    install_hooks()


def no_platform() -> None:
    """Entry point of ``vllm.platform_plugins``; its None tells vLLM that this is no platform.

    vLLM calls it when it looks for its platform, before it validates ``attention_config``
    and before a spawned process unpickles its configuration: both need the name PREFIX_SHARE,
    and general plugins are loaded after them.
    """
    register()


def no_device() -> None:
    """Entry point of ``torch.backends``, called at the end of ``import torch``.

    With ``VLLM_TARGET_DEVICE=cpu`` vLLM resolves its platform without any platform plugin. vLLM
    imports PyTorch before it validates or unpickles a configuration, so this is early enough. It
    does nothing in other programs, nor where ``VLLM_PLUGINS`` leaves the plugin out.
    """
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() != "cpu":
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or "prefix_share" in allowed.split(","):
        register()
