"""Every function of vLLM that this plugin changes at run time. Its files stay as released.

Each hook says what it changes, why, and when it can go. ``install_hooks`` may run any number
of times in a process: a hook is recognised by the mark it leaves on its target.
"""

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_prefixshare import envs
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.types import PrefixShareError

BACKEND_NAME = "PREFIX_SHARE"
BACKEND_PATH = "vllm_prefixshare.integration.cpu.PrefixShareCPUBackend"
EXTENSION_PATH = "vllm_prefixshare.integration.stats.PrefixShareWorkerExtension"
ENV_VAR = "VLLM_ATTENTION_BACKEND"
_MARK = "_vllm_prefixshare_hook"


@dataclass(frozen=True, slots=True)
class Hook:
    """target: dotted name of what changes. why: the need. until: when it can go."""

    target: str
    why: str
    until: str
    install: Callable[[], object]


def backend_member() -> Any:
    """The enum member PREFIX_SHARE, made on first use.

    It pickles as a call of this function: spawned workers unpickle their configuration
    before plugins are loaded, when the enum does not know the name yet.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, BACKEND_PATH)
        member = AttentionBackendEnum.__members__[BACKEND_NAME]
        member.__reduce_ex__ = lambda protocol: (backend_member, ())
    return AttentionBackendEnum.__members__[BACKEND_NAME]


def _register_environment() -> None:
    import vllm.envs

    ours = os.environ.get(ENV_VAR, "").upper() == BACKEND_NAME
    for name in (*envs.VARIABLES, *((ENV_VAR,) if ours else ())):
        vllm.envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))


def _wrap(
    owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace ``owner.name`` by ``wrapper(owner.name)``, once."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return
    static = owner.__dict__.get(name)
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, staticmethod(wrapped) if isinstance(static, classmethod) else wrapped)


def _hook_engine_config() -> None:
    from vllm.engine.arg_utils import EngineArgs

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                _select_from_environment(self)
                config = original(self, *args, **kwargs)
                chosen = config.attention_config
                if backend_member() in (chosen.backend, *chosen.backend_per_kind.values()):
                    _check_engine_config(config)
                return config
            except PrefixShareError as e:
                refuse(e)

        return create_engine_config

    _wrap(EngineArgs, "create_engine_config", wrapper)


def refuse(error: PrefixShareError) -> NoReturn:
    """Raise ``error``, or, under the ``vllm`` command, print it and exit with status 2."""
    if os.path.basename(sys.argv[0]) != "vllm":
        raise error
    print(f"vllm: error: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def _select_from_environment(engine_args: Any) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    name = os.environ.get(ENV_VAR, "").upper()
    if not name:
        return
    if name not in AttentionBackendEnum.__members__:
        raise PrefixShareError(
            f"{ENV_VAR}={os.environ[ENV_VAR]!r} is not an attention backend: "
            f"set it to {BACKEND_NAME} or unset it."
        )
    chosen = engine_args.attention_backend or getattr(engine_args.attention_config, "backend", None)
    if name == BACKEND_NAME and chosen is None:
        engine_args.attention_backend = backend_member()


def _check_engine_config(config: Any) -> None:
    """Refuse at start-up what would fail later; give the workers the statistics method."""
    from vllm_prefixshare.executors.cpu import cpu_executor
    from vllm_prefixshare.planning.cost_table import CostTable
    from vllm_prefixshare.planning.dividers import get_divider
    from vllm_prefixshare.profiling.tables import fingerprint

    envs.check_environment()
    get_divider(envs.get("VLLM_PREFIXSHARE_DIVIDER"))
    if (table := envs.get("VLLM_PREFIXSHARE_COST_TABLE")) is not None:
        attention = _attention_of(config)
        CostTable.load(table, fingerprint(attention, cpu_executor(attention).name))
    check_platform()
    if not config.parallel_config.worker_extension_cls:
        config.parallel_config.worker_extension_cls = EXTENSION_PATH


def check_platform() -> None:
    """Refuse a platform without an executor.

    Raises:
        PrefixShareError: it is not the CPU platform.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise PrefixShareError(
            f"{BACKEND_NAME} serves the CPU platform in this version: unset {ENV_VAR} here."
        )


def _attention_of(config: Any) -> AttentionConfig:
    """The shape of the model's full-attention layers on one rank."""
    model, parallel = config.model_config, config.parallel_config
    return AttentionConfig(
        model.get_num_attention_heads(parallel),
        model.get_num_kv_heads(parallel),
        model.get_head_size(),
        config.cache_config.block_size,
        str(model.dtype).removeprefix("torch."),
    )


def _hook_cpu_platform() -> None:
    from vllm.platforms.cpu import CpuPlatform

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_attn_backend_cls(
            selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
        ) -> str:
            if selected_backend is not backend_member():
                return original(selected_backend, attn_selector_config, *args, **kwargs)
            from vllm_prefixshare.integration.cpu import refusal

            reason = refusal(attn_selector_config)
            if reason is None:
                return BACKEND_PATH
            fall_back(reason)
            return original(None, attn_selector_config, *args, **kwargs)

        return get_attn_backend_cls

    _wrap(CpuPlatform, "get_attn_backend_cls", wrapper)


def fall_back(reason: str) -> None:
    """Say once that a layer keeps vLLM's own backend; refuse under the strict setting.

    Raises:
        PrefixShareError: VLLM_PREFIXSHARE_STRICT=1.
    """
    if envs.get("VLLM_PREFIXSHARE_STRICT"):
        raise PrefixShareError(f"{BACKEND_NAME} does not serve a layer ({reason}) and STRICT=1.")
    logger().warning_once("Layers with %s keep vLLM's own attention backend.", reason)


def logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.prefixshare")


HOOKS = (
    Hook(
        "vllm.v1.attention.backends.registry.AttentionBackendEnum",
        "a backend needs an enum member, and a dynamic one does not survive pickling",
        "dynamic members pickle by name",
        backend_member,
    ),
    Hook(
        "vllm.envs.environment_variables",
        "vLLM warns of VLLM_* variables that it does not know",
        "plugins can declare their variables",
        _register_environment,
    ),
    Hook(
        "vllm.engine.arg_utils.EngineArgs.create_engine_config",
        f"vLLM no longer reads {ENV_VAR}; wrong settings must be refused before work starts",
        "vLLM reads it again and lets a backend check the whole configuration",
        _hook_engine_config,
    ),
    Hook(
        "vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls",
        "the CPU platform ignores the selected backend",
        "it honours it",
        _hook_cpu_platform,
    ),
)


def install_hooks() -> None:
    """Apply all of ``HOOKS``; those in force already are left alone."""
    for hook in HOOKS:
        hook.install()
