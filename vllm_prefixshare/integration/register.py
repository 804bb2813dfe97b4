"""The entry points that vLLM calls. Both install the hooks and import no vLLM module: a hook waits
until vLLM imports the module that it changes.
"""


def register() -> None:
    """Entry point of ``vllm.general_plugins``: called in each process, possibly more than once."""
    from vllm_prefixshare.integration.hooks.registry import install_hooks

    install_hooks()


def no_platform() -> None:
    """Entry point of ``vllm.platform_plugins``; its None tells vLLM that this is no platform.

    vLLM calls it when it looks for its platform, before it validates ``attention_config``
    and before a spawned process unpickles its configuration: both need the name PREFIX_SHARE,
    and general plugins are loaded after them.
    """
    register()
