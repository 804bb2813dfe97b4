"""Every function of vLLM that this plugin changes at run time. Its files stay as released.

Each hook says what it changes, why, and when it can go. ``install_hooks`` may run any number
of times in a process: a hook is recognised by the mark it leaves on its target.
"""

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_prefixshare import envs
from vllm_prefixshare.config import DTYPES, AttentionConfig
from vllm_prefixshare.integration import compat, host_tables
from vllm_prefixshare.records import PrefixShareError

BACKEND_NAME = "PREFIX_SHARE"
CPU_BACKEND = "vllm_prefixshare.integration.cpu.backend.PrefixShareCPUBackend"
CUDA_BACKEND = "vllm_prefixshare.integration.cuda.backend.PrefixShareCUDABackend"
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
    """The enum member PREFIX_SHARE, made on first use; None where another plugin has taken the
    only free one, as there is before vLLM 0.32.

    It pickles as a call of this function: spawned workers unpickle their configuration
    before plugins are loaded, when the enum does not know the name yet.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = CPU_BACKEND if current_platform.is_cpu() else CUDA_BACKEND
    if not hasattr(AttentionBackendEnum, "register"):
        free = AttentionBackendEnum.CUSTOM  # ours is another name for it
        if not free.is_overridden():
            register_backend(free, path)
        if free.get_path() != path:
            AttentionBackendEnum._member_map_.pop(BACKEND_NAME, None)
            return None
        AttentionBackendEnum._member_map_[BACKEND_NAME] = free
    elif BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, path)
        member = AttentionBackendEnum.__members__[BACKEND_NAME]
        member.__reduce_ex__ = lambda protocol: (backend_member, ())
    return AttentionBackendEnum.__members__[BACKEND_NAME]


def is_ours(backend: Any) -> bool:
    """Whether a chosen backend (None: vLLM's choice) is PREFIX_SHARE."""
    return backend is not None and backend is backend_member()


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
    static = inspect.getattr_static(owner, name)
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
                if any(map(is_ours, (chosen.backend, *chosen.backend_per_kind.values()))):
                    _check_engine_config(config)
                return config
            except PrefixShareError as e:
                refuse(e)

        return create_engine_config

    _wrap(EngineArgs, "create_engine_config", wrapper)


def refuse(error: PrefixShareError) -> NoReturn:
    """Raise ``error``, or, under the ``vllm`` command, print it and exit with status 2."""
    command = sys.argv[0]
    if os.path.basename(command) != "vllm" and not command.endswith("vllm/entrypoints/cli/main.py"):
        raise error
    print(f"vllm: error: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def _select_from_environment(engine_args: Any) -> None:
    name = os.environ.get(ENV_VAR, "").upper()
    if name != BACKEND_NAME:  # others are of earlier releases, and vLLM says that it ignores them
        if difflib.get_close_matches(name, [BACKEND_NAME]):
            raise PrefixShareError(
                f"{ENV_VAR}={os.environ[ENV_VAR]!r} is not an attention backend: "
                f"set it to {BACKEND_NAME} or unset it."
            )
        return
    chosen = engine_args.attention_backend or getattr(engine_args.attention_config, "backend", None)
    if chosen is not None:
        return
    if backend_member() is None:
        raise PrefixShareError(
            f"{BACKEND_NAME} needs the backend CUSTOM of this vLLM, which another plugin has: "
            "choose the plugins to load with VLLM_PLUGINS, or use vLLM 0.32 or later."
        )
    engine_args.attention_backend = backend_member()


def _check_engine_config(config: Any) -> None:
    """Refuse at start-up what would fail later; give the workers the statistics method."""
    from vllm.platforms import current_platform

    from vllm_prefixshare.costs.cost_table import CostTable
    from vllm_prefixshare.planning.dividers.registry import get_divider

    envs.check_environment()
    if (divider := envs.get("VLLM_PREFIXSHARE_DIVIDER")) != "auto":
        get_divider(divider)
    check_platform()
    if (table := envs.get("VLLM_PREFIXSHARE_COST_TABLE")) is not None:
        expected = None  # a worker checks that it fits: asking for the GPU here would start CUDA
        if current_platform.is_cpu():
            from vllm_prefixshare.costs.lookup import fingerprint
            from vllm_prefixshare.kernels.cpu.executor import cpu_executor

            attention = _attention_of(config)
            expected = fingerprint(attention, cpu_executor(attention).name)
        CostTable.load(table, expected)
    if not config.parallel_config.worker_extension_cls:
        config.parallel_config.worker_extension_cls = EXTENSION_PATH


def check_platform() -> None:
    """Refuse a platform without an executor.

    Raises:
        PrefixShareError: it is neither a CPU nor an NVIDIA GPU of compute capability 8.0, or
            this vLLM is not supported there.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        compat.check_vllm_version(on_cpu=True)
        return
    if not current_platform.is_cuda() or not current_platform.has_device_capability(80):
        raise PrefixShareError(
            f"{BACKEND_NAME} serves CPUs and NVIDIA GPUs of compute capability 8.0 or more: "
            "choose another attention backend here."
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


def _hook_platform() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _choose_backends(type(current_platform), DTYPES, CPU_BACKEND)
    elif current_platform.is_cuda():
        # the backend is one of vLLM's own, and its configuration is validated as such
        _choose_backends(type(current_platform), ("bfloat16", "float16"), None)


def _choose_backends(platform: type, dtypes: tuple[str, ...], path: str | None) -> None:
    """Choose ``path`` for the layers that are served (None: what the platform makes of our
    member) and the platform's own backend for the others."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_attn_backend_cls(
            selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
        ) -> str:
            if not is_ours(selected_backend):
                return original(selected_backend, attn_selector_config, *args, **kwargs)
            from vllm_prefixshare.integration.support import fall_back, selector_refusal

            reason = selector_refusal(attn_selector_config, dtypes)
            if reason is not None:
                fall_back(reason)
                return original(None, attn_selector_config, *args, **kwargs)
            return path or original(selected_backend, attn_selector_config, *args, **kwargs)

        return get_attn_backend_cls

    _wrap(platform, "get_attn_backend_cls", wrapper)


def _hook_v1_block_table() -> None:
    from vllm.v1.worker.block_table import BlockTable

    _wrap(BlockTable, "__init__", _then(host_tables.keep_v1_table))


def _hook_v2_block_tables() -> None:
    from vllm.v1.worker.gpu.block_table import BlockTables

    def get_dummy_block_tables(self: Any, num_reqs: int) -> None:
        host_tables.note_batch(self, None)

    _wrap(BlockTables, "__init__", _then(host_tables.keep_v2_tables))
    _wrap(BlockTables, "append_block_ids", _first(host_tables.note_block_ids))
    _wrap(BlockTables, "get_dummy_block_tables", _first(get_dummy_block_tables))


def _hook_v2_batch() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def prepare_attn(self: Any, input_batch: Any) -> None:
        host_tables.note_batch(self.block_tables, input_batch.idx_mapping_np)

    _wrap(GPUModelRunner, "prepare_attn", _first(prepare_attn))


def _hook_wake_up() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def wake_up(self: Any, tags: list[str] | None = None) -> Any:
            result = original(self, tags)
            # the backend's module is loaded only where it was chosen
            backend = sys.modules.get("vllm_prefixshare.integration.cuda.metadata")
            if backend is not None and (tags is None or "kv_cache" in tags):
                backend.after_wake_up()
            return result

        return wake_up

    _wrap(Worker, "wake_up", wrapper)


def _then(note: Callable[[Any], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrapper that calls ``note(self)`` after the original."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            note(self)
            return result

        return wrapped

    return wrapper


def _first(note: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrapper that calls ``note`` with the arguments of the original before it."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return original(*args, **kwargs)

        return wrapped

    return wrapper


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
        "vllm.platforms.Platform.get_attn_backend_cls",
        "a layer that is not served keeps vLLM's own backend, and the CPU platform ignores "
        "which backend was selected",
        "a backend can decline a layer, and the CPU platform honours the selection",
        _hook_platform,
    ),
    Hook(
        "vllm.v1.worker.block_table.BlockTable.__init__",
        "builders need the block ids on the host, and are given those of the device (V1 runner)",
        "CommonAttentionMetadata carries the host's block table",
        _hook_v1_block_table,
    ),
    Hook(
        "vllm.v1.worker.gpu.block_table.BlockTables",
        "the V2 runner sends block ids to the device and keeps none (__init__, "
        "append_block_ids, get_dummy_block_tables)",
        "CommonAttentionMetadata carries the host's block table",
        _hook_v2_block_tables,
    ),
    Hook(
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_attn",
        "which request slots make up the batch (V2 runner)",
        "CommonAttentionMetadata has req_idx in every supported release",
        _hook_v2_batch,
    ),
    Hook(
        "vllm.v1.worker.gpu_worker.Worker.wake_up",
        "sleep gives away the memory that plans and the KV cache lie in",
        "metadata builders are told of it, and the KV cache is zeroed",
        _hook_wake_up,
    ),
)


def install_hooks() -> None:
    """Apply all of ``HOOKS``; those in force already are left alone.

    Raises:
        PrefixShareError: this vLLM lacks a target, or it cannot be imported here.
    """
    for hook in HOOKS:
        try:
            hook.install()
        except (ImportError, AttributeError) as e:
            raise PrefixShareError(
                f"{BACKEND_NAME} cannot hook {hook.target}: {e}. Choose another attention backend."
            ) from e
