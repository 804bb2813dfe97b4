"""Hooks that let the backend be chosen, and reject at start-up what would fail later."""

import contextlib
import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from vllm_prefixshare.config import LATENT_SHAPE, AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.settings import VARIABLES, settings
from vllm_prefixshare.vllm_plugin import (
    BACKEND_NAME,
    COMPOSITE_BACKEND,
    CPU_BACKEND,
    CUDA_BACKEND,
    background_compilation,
    compat,
    invariance,
)
from vllm_prefixshare.vllm_plugin.backends.platform_backend import latent_backend
from vllm_prefixshare.vllm_plugin.eligibility.fallback import declines
from vllm_prefixshare.vllm_plugin.eligibility.layer import LayerSpec
from vllm_prefixshare.vllm_plugin.eligibility.platform import CUDA_DTYPES, Platform, gpu_extras
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal
from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, extend, wrap
from vllm_prefixshare.vllm_plugin.observability import metrics
from vllm_prefixshare.vllm_plugin.step.mixed_graphs import choose_mixed_graphs, named_by_user

EXTENSION_PATH = "vllm_prefixshare.vllm_plugin.observability.stats.PrefixShareWorkerExtension"
ENV_VAR = "VLLM_ATTENTION_BACKEND"


def hook_backend_enum(module: ModuleType) -> None:
    """Add the member PREFIX_SHARE. Its value is the CUDA backend; on a CPU the platform's hook
    returns the CPU backend.

    Made as ``AttentionBackendEnum.register`` makes dynamic members (vLLM 0.32 and later), but it
    pickles as a call of ``backend_member``: spawned workers unpickle their configuration in a
    process that has not made it yet.
    """
    enum = module.AttentionBackendEnum
    if BACKEND_NAME in enum._member_map_:
        return
    member = object.__new__(enum)
    member._name_, member._value_ = BACKEND_NAME, CUDA_BACKEND
    member.__reduce_ex__ = lambda protocol: (backend_member, ())
    setattr(enum, BACKEND_NAME, member)
    enum._member_map_[BACKEND_NAME] = member
    enum._value2member_map_[CUDA_BACKEND] = member
    enum._member_names_.append(BACKEND_NAME)


def backend_member() -> Any:
    """The member PREFIX_SHARE of ``AttentionBackendEnum``."""
    from vllm.v1.attention.backends import registry

    hook_backend_enum(registry)
    return registry.AttentionBackendEnum[BACKEND_NAME]


def is_ours(backend: Any) -> bool:
    """Whether a chosen backend, as enum member or name, is PREFIX_SHARE. None: vLLM's choice."""
    name = backend if isinstance(backend, str) else getattr(backend, "name", "")
    return bool(name.upper() == BACKEND_NAME)


def hook_environment(module: ModuleType) -> None:
    """Make this plugin's variables known to vLLM, which warns of unknown ones.

    vLLM also reads each known variable into the key of its torch.compile cache. This plugin's
    variables change no compiled graph, and one names a folder that is new in each process, so vLLM
    gets no values.
    """
    ours = is_ours(os.environ.get(ENV_VAR, ""))
    for name in (*VARIABLES, *((ENV_VAR,) if ours else ())):
        module.environment_variables.setdefault(name, lambda: None)


def hook_engine_config(module: ModuleType) -> None:
    """Choose the backend from the environment, and check the finished configuration."""
    if extend(module, "engine_config_checks", check_engine):
        return

    def wrapper(original: Function) -> Function:
        @reporting_errors()
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            check_config = check_engine(self, args[0] if args else kwargs.get("usage_context"))
            config = original(self, *args, **kwargs)
            check_config(config)
            return config

        return create_engine_config

    wrap(module.EngineArgs, "create_engine_config", wrapper)


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """Raise a ``PrefixShareError`` of the block, or, in a program of vLLM's, print it and exit with
    status 2: a traceback says nothing to those who did not write the program.
    """
    try:
        yield
    except PrefixShareError as error:
        program = sys.argv[0]
        if os.path.basename(program) != "vllm" and "/vllm/entrypoints/" not in program:
            raise
        print(f"vllm: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@reporting_errors()
def check_engine(engine_args: Any, usage_context: Any) -> Callable[[Any], None]:
    """Choose the backend from the environment, and check what is known before the ``VllmConfig`` of
    an engine is made.

    Args:
        engine_args: ``EngineArgs``.
        usage_context: vLLM's ``UsageContext``, or None.

    Returns:
        A function that checks and completes the finished ``VllmConfig``.
    """
    choose_from_environment(engine_args)
    if _chosen_by(engine_args):
        check_platform()
        background_compilation.start_planning()
        check_config = functools.partial(
            _check_engine_config,
            named=named_by_user(engine_args),
            offline=getattr(usage_context, "name", "") == "LLM_CLASS",
        )
    else:
        check_config = functools.partial(
            metrics.start_for_engine, "api_server", uses_prefix_share=False
        )
    return reporting_errors()(check_config)


def _chosen_by(engine_args: Any) -> bool:
    """Whether ``EngineArgs`` name PREFIX_SHARE. Where a release has no such fields, they do not:
    ``compat.check_release`` tells those who chose it by the environment.
    """
    return is_ours(getattr(engine_args, "attention_backend", None)) or chosen_in(
        getattr(engine_args, "attention_config", None)
    )


def chosen_in(attention_config: Any) -> bool:
    """Whether a vLLM ``AttentionConfig`` names PREFIX_SHARE, for all layers or a kind of them."""
    per_kind = getattr(attention_config, "backend_per_kind", {})
    return is_ours(getattr(attention_config, "backend", None)) or any(
        map(is_ours, per_kind.values())
    )


def choose_from_environment(engine_args: Any) -> None:
    """Choose PREFIX_SHARE where the environment names it and no argument names a backend.

    Raises:
        PrefixShareError: see ``named_by_environment``.
    """
    if not named_by_environment():
        return
    config = getattr(engine_args, "attention_config", None)
    if getattr(engine_args, "attention_backend", None) or getattr(config, "backend", None):
        return
    engine_args.attention_backend = backend_member()


def named_by_environment() -> bool:
    """Whether VLLM_ATTENTION_BACKEND names PREFIX_SHARE.

    Raises:
        PrefixShareError: the variable holds a misspelt PREFIX_SHARE.
    """
    name = os.environ.get(ENV_VAR, "")
    if not is_ours(name) and difflib.get_close_matches(name.upper(), [BACKEND_NAME]):
        raise PrefixShareError(
            f"{ENV_VAR}={name!r} is not an attention backend: set it to {BACKEND_NAME} or unset it."
        )
    return is_ours(name)  # names of earlier releases are not: vLLM warns that it ignores them


def _check_engine_config(config: Any, named: frozenset[str], offline: bool) -> None:
    """Reject settings that would fail later; set up mixed graphs, the workers' statistics method,
    ``/metrics`` and the scheduler's order.

    Args:
        named: as ``named_by_user`` returns it.
        offline: whether the engine is known to serve ``vllm.LLM``.
    """
    from vllm.platforms import current_platform

    from vllm_prefixshare.vllm_plugin.scheduling.order import order_requests

    check_settings()
    if not current_platform.is_cpu():
        choose_mixed_graphs(config, named)
        # a worker would reject it once it has loaded the weights
        if settings().kernel == "hopper":
            _check_hopper(current_platform.is_device_capability(90))
        with background_compilation.best_effort():  # as where no kernel serves the model's shape
            attention = _attention_of(config)
            if not _is_rejected(attention):
                background_compilation.start_kernels(attention, config)
    # its operator writes latents without the implementation, which makes them finite
    config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = False
    if not config.parallel_config.worker_extension_cls:
        config.parallel_config.worker_extension_cls = EXTENSION_PATH
    metrics.start_for_engine("api_server", config, uses_prefix_share=True)
    order_requests(config, offline)


def _check_hopper(is_hopper: bool) -> None:
    """Reject a GPU or a Triton without the Hopper kernel, where it was named."""
    from vllm_prefixshare.kernels.registry import import_kernel

    if not is_hopper:
        raise PrefixShareError(
            "VLLM_PREFIXSHARE_KERNEL=hopper needs a GPU of compute capability 9.0: set it to auto."
        )
    try:
        import_kernel("hopper")
    except PrefixShareError as e:
        raise PrefixShareError(
            f"VLLM_PREFIXSHARE_KERNEL=hopper cannot be used ({str(e).removesuffix('.')}): set it "
            "to auto, or install the Triton that vLLM brings."
        ) from e


def check_settings() -> None:
    """Reject unknown variables, values and dividers, and a file that is no cost table; a worker
    checks that a table fits its machine and layers.

    Raises:
        PrefixShareError: naming the variable.
    """
    if (divider := settings().divider) is not None:
        from vllm_prefixshare.planning.dividers.registry import get_divider

        get_divider(divider)
        invariance.check_divider(divider)
    if (table := settings().cost_table) is not None:
        from vllm_prefixshare.planning.costs.table import CostTable

        CostTable.load(table)


def check_platform() -> bool:
    """Reject a vLLM or a platform that is not supported.

    Returns:
        whether it is the CPU platform.

    Raises:
        PrefixShareError: the release is not known, one of its hook targets moved, or the platform
            is neither a CPU nor an NVIDIA GPU of compute capability 8.0 or more.
    """
    from vllm.platforms import current_platform

    on_cpu: bool = current_platform.is_cpu()
    compat.check_release(on_cpu=on_cpu)
    served = current_platform.is_cuda() and current_platform.has_device_capability(80)
    if not on_cpu and not served:
        raise PrefixShareError(
            f"{BACKEND_NAME} serves CPUs and NVIDIA GPUs of compute capability 8.0 or more: "
            "choose another attention backend here."
        )
    return on_cpu


def _attention_of(config: Any) -> AttentionConfig:
    """The shape of the model's full-attention layers on one rank; as ``groups.attention_of``."""
    model, parallel = config.model_config, config.parallel_config
    return AttentionConfig(
        model.get_num_attention_heads(parallel) * parallel.decode_context_parallel_size,
        model.get_num_kv_heads(parallel),
        model.get_head_size(),
        config.cache_config.block_size or 16,  # may not be known yet
        str(model.dtype).removeprefix("torch."),
        kv_lora_rank=LATENT_SHAPE[1] if model.use_mla else None,
    )


def _is_rejected(attention: AttentionConfig) -> bool:
    """Whether a GPU serves no layers of this shape, as far as it tells."""
    layer = LayerSpec(
        attention.head_dim,
        attention.dtype,
        num_heads=attention.num_qo_heads,
        use_mla=attention.kv_lora_rank is not None,
    )
    return refusal(layer, Platform(CUDA_DTYPES, gpu_extras(anywhere=True))) is not None


def hook_cuda_platform(module: ModuleType) -> None:
    """Let CUDA layers that are not served keep vLLM's own backend."""
    _choose_backends(module.CudaPlatformBase, on_gpu=True)


def hook_cpu_platform(module: ModuleType) -> None:
    """Let the CPU platform use the backend for the layers that are served."""
    _choose_backends(module.CpuPlatform, on_gpu=False)


def _choose_backends(platform: type, on_gpu: bool) -> None:
    """Choose PREFIX_SHARE for the layers that are served, and the platform's own backend for the
    others. On a GPU the platform finds ours by the member of its enum.
    """

    def wrapper(original: Function) -> Function:
        def get_attn_backend_cls(
            cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if not is_ours(selected_backend):
                return original(cls, selected_backend, attn_selector_config, *args, **kwargs)
            declined = declines(attn_selector_config, on_gpu) is not None
            if declined or attn_selector_config.use_mla:
                own = original(cls, None, attn_selector_config, *args, **kwargs)
                return own if declined else latent_backend(own, attn_selector_config)
            if not on_gpu:
                return CPU_BACKEND
            if attn_selector_config.use_mm_prefix:
                # vLLM checks the child that computes causal attention
                layer = attn_selector_config._replace(use_mm_prefix=False)
                original(cls, selected_backend, layer, *args, **kwargs)
                return COMPOSITE_BACKEND
            return original(cls, selected_backend, attn_selector_config, *args, **kwargs)

        return get_attn_backend_cls

    wrap(platform, "get_attn_backend_cls", wrapper)
