"""Check what an engine would check, and say which layers of a model would be served."""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import vllm_prefixshare
from vllm_prefixshare.cli.options import (
    add_cache_argument,
    add_model_argument,
    check_range,
)
from vllm_prefixshare.cli.served import falls_back, in_engine
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning.costs import lookup
from vllm_prefixshare.planning.costs.table import CostTable
from vllm_prefixshare.settings import PROMPT_PARTS, VARIABLES, settings
from vllm_prefixshare.vllm_plugin import compat
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import LayerKind, layer_kinds
from vllm_prefixshare.vllm_plugin.observability import metrics, tracing

EXAMPLE = """\
Is everything in place, and which layers of a model would be served?

    vllm-prefixshare doctor --model /models/Llama-3.1-8B

Each line is a check that an engine makes when it starts. The exit status is 0 if PREFIX_SHARE can
be chosen, 1 if not."""
#: a layer of Llama-3.1-8B, for which a kernel is chosen without a model
USUAL = LayerKind(128, "bfloat16", num_heads=32, num_kv_heads=8, name="full attention", count=1)
#: name of a kernel, and why another that comes before it does not serve
Choice = tuple[str, str | None]
#: far more than any method proposes
MAX_DRAFTS = 1024
#: A tokenizer library that vLLM uses where a variable asks for it.
FASTOKENS = "fastokens>=0.3.5"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
#: Seconds that the analysis of a tokenizer may take; it takes up to three.
ANALYSIS_SECONDS = 60.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model_argument(command)
    command.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="GPUs that divide the model's heads among them; needs --model",
    )
    command.add_argument(
        "--decode-context-parallel-size",
        type=int,
        default=1,
        help="those of them among which each request's KV is divided; needs --model",
    )
    command.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=0,
        help="drafts that a decode verifies",
    )
    add_cache_argument(command)


@dataclass
class Machine:
    """Results of earlier checks that later ones use.

    layers: the kinds of layers of the model, as one GPU has them; a usual one without a model.
    model: the folder of the model, if one is named.
    query_len: maximum number of query tokens of a decode.
    on_cpu: whether vLLM runs on its CPU platform; None until it is known.
    kernels: the name of the kernel for each shape that would be served here.
    served: what becomes of the model's layers that have a KV cache; ``falls_back`` is why a layer
        would not be served, None if it would.
    """

    layers: list[LayerKind]
    model: Path | None = None
    query_len: int = 1
    on_cpu: bool | None = None
    kernels: dict[AttentionConfig, str] = field(default_factory=dict)
    served: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """The outcome of a check: whether an engine could start, one sentence, and how long it took."""

    check: str
    ok: bool
    says: str
    seconds: float


def run(args: argparse.Namespace) -> int:
    """Run every check and print the report; 0 if PREFIX_SHARE can be chosen here, else 1."""
    gpus, shards, drafts = _counts(args)
    # vLLM's own log would be mixed into the report
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    kinds = [USUAL] if args.model is None else layer_kinds(args.model)
    kinds = in_engine(kinds, args.kv_cache_dtype, gpus, shards, drafts)
    machine = Machine(kinds, args.model, query_len=1 + drafts)
    results = [_try(name, check, machine) for name, check in CHECKS.items()]
    if args.model is not None:
        results.append(_try("layers", layers, machine))
    if machine.served:
        results.append(_try("strict", strict, machine))
    ok = all(result.ok for result in results)
    if args.json:
        report = {"ok": ok, "checks": [asdict(r) for r in results], "layers": machine.served}
        print(json.dumps(report, indent=1))
    else:
        _print(results, machine, ok)
    return 0 if ok else 1


def _counts(args: argparse.Namespace) -> tuple[int, int, int]:
    """GPUs, ranks with a shard of each request's KV, and drafts.

    Raises:
        PrefixShareError: vLLM would refuse them for any model, or they say nothing without one.
    """
    gpus, shards = args.tensor_parallel_size, args.decode_context_parallel_size
    drafts = args.num_speculative_tokens
    if gpus < 1:
        raise PrefixShareError(f"--tensor-parallel-size must be 1 or more, got {gpus}.")
    if shards < 1 or gpus % shards:
        raise PrefixShareError(
            f"--decode-context-parallel-size must divide --tensor-parallel-size {gpus}, got "
            f"{shards}."
        )
    check_range(args, "num-speculative-tokens", 0, MAX_DRAFTS)
    if gpus > 1 and args.model is None:  # without GPUs to divide them, there are no shards
        raise PrefixShareError(
            f"--tensor-parallel-size {gpus} needs --model: name the folder of the model whose "
            "heads are divided."
        )
    return gpus, shards, drafts


def _try(name: str, check: Callable[[Machine], str], machine: Machine) -> Result:
    began = time.perf_counter()
    try:
        ok, says = True, check(machine)
    except Exception as e:  # a GPU that is full or lost
        ok, says = False, _as_sentence(e)
    return Result(name, ok, says, round(time.perf_counter() - began, 2))


def _as_sentence(error: Exception) -> str:
    if isinstance(error, PrefixShareError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{error}: install what is missing, or reinstall vLLM."
    return (
        f"the check ended with {type(error).__name__} ({_first_line(error)}): free memory on this "
        "GPU and machine if it is full, else report it."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]


def package(machine: Machine) -> str:
    """This package's version."""
    return f"vllm_prefixshare {vllm_prefixshare.__version__}"


def plugin(machine: Machine) -> str:
    """Both entry points, as vLLM will look for them."""
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        if not any(p.value.startswith("vllm_prefixshare.") for p in entry_points(group=group)):
            raise PrefixShareError(
                f"vLLM does not find the plugin in {group}: reinstall it with 'pip install .'."
            )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "prefix_share" not in allowed.split(","):
        raise PrefixShareError("VLLM_PLUGINS leaves out the plugin: add prefix_share to it.")
    return "registered"


def environment(machine: Machine) -> str:
    """Variables, the divider, the form of a cost table, and whether named files can be written."""
    from vllm_prefixshare.vllm_plugin.hooks.selection import check_settings, named_by_environment

    named_by_environment()
    check_settings()
    metrics.named_folder()
    if (trace := settings().trace) is not None:
        os.close(tracing.open_file(trace))
    changed = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return ", ".join(changed) or "all at their defaults"


def release(machine: Machine) -> str:
    """The vLLM release and the names that are hooked."""
    compat.check_release(on_cpu=False)  # as the next check asks, which is answered already
    return f"vLLM {compat.vllm_version()}, with every name that is hooked"


def platform(machine: Machine) -> str:
    """The platform that vLLM chose, and the name of its GPU."""
    from vllm_prefixshare.vllm_plugin.hooks.selection import check_platform

    machine.on_cpu = check_platform()
    return "CPU" if machine.on_cpu else lookup.gpu()


def kernel(machine: Machine) -> str:
    """The kernels that serve the layers; compiles them, as in an engine."""
    if machine.on_cpu is None:
        raise PrefixShareError("not known without a platform: see above.")
    block_size = 128 if machine.on_cpu else None  # vLLM's
    passed_over: list[str] = []
    served = [layer for layer, reason in _refusals(machine) if reason is None]
    shapes = [replace(layer, block_size=block_size).attention_config() for layer in served]
    for shape in dict.fromkeys(shapes):
        if machine.on_cpu:
            from vllm_prefixshare.kernels.cpu.executor import cpu_executor

            machine.kernels[shape] = cpu_executor(shape, passed_over.append).name
        else:
            choice = gpu_kernel(shape, machine.query_len)
            machine.kernels[shape] = choice[0]
            passed_over += filter(None, choice[1:])
    names = ", ".join(dict.fromkeys(machine.kernels.values()))
    return " ".join([names or "none: no layer would be served", *dict.fromkeys(passed_over)])


def gpu_kernel(attention: AttentionConfig, query_len: int) -> Choice:
    """The kernel that serves this shape on the first GPU; compiles it.

    Raises:
        PrefixShareError: no kernel serves it, or none compiles.
    """
    import torch

    from vllm_prefixshare.kernels.registry import choose_kernel

    choice = choose_kernel(attention, torch.device("cuda", 0), settings().kernel, query_len)
    return choice.kernel.name, choice.passed_over


def cost_table(machine: Machine) -> str:
    """Whether the table that is named was measured on this machine, for the layers' shapes."""
    path = settings().cost_table
    if path is None:
        return "none named"
    if machine.model is None:
        return f"{path}, not compared with a model: give --model"
    kernel(machine)  # if it failed, this is why nothing is known
    if not machine.kernels:
        return f"{path}, which no layer would read"
    for shape, name in machine.kernels.items():
        CostTable.load(path, lookup.fingerprint(shape, name))
    return str(path)


def host_work(machine: Machine) -> str:
    """The active parts of the shared host work, whether the model's tokenizer has a memo, and what
    makes tokenization faster.
    """
    wants_fastokens = os.environ.get("VLLM_USE_FASTOKENS") == "1"
    has_fastokens = find_spec("fastokens") is not None
    if wants_fastokens and not has_fastokens:
        raise PrefixShareError(
            f"VLLM_USE_FASTOKENS=1 needs fastokens: pip install '{FASTOKENS}', or unset it."
        )
    wanted = settings().prompts
    active = [part for part in PROMPT_PARTS if wanted is None or part in wanted]
    if not active:
        return "off"
    says = ["all parts" if len(active) == len(PROMPT_PARTS) else ", ".join(active)]
    if machine.model is not None and "tokenization" in active:
        says.append(_tokenizer(machine.model))
    if not wants_fastokens:
        install = "" if has_fastokens else f"pip install '{FASTOKENS}' and "
        says.append(f"new text is tokenized faster with {install}VLLM_USE_FASTOKENS=1")
    return "; ".join(says)


def _tokenizer(folder: Path) -> str:
    """Whether texts are cut for the tokenizer of a model."""
    from vllm_prefixshare.vllm_plugin.prompts.split_pattern import NotExactError
    from vllm_prefixshare.vllm_plugin.prompts.tokenization import (
        TextTokenizer,
        text_cache,
        text_tokenizer,
    )

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return "the model's folder has no tokenizer that could be checked"
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as e:  # what is wrong in its files raises errors of any kind
        return f"the tokenizer cannot be loaded ({_first_line(e)})"
    if text_tokenizer(tokenizer, ANALYSIS_SECONDS) is not None:
        return "known text is not tokenized again"
    backend: Any = getattr(tokenizer, "_tokenizer", None)
    try:
        TextTokenizer(backend, text_cache())
    except NotExactError as e:
        reason = _first_line(e)
    else:
        reason = f"{type(tokenizer).__name__} changes what its backend returns"
    return f"tokenization of this model is left to vLLM ({reason})"


CHECKS: dict[str, Callable[[Machine], str]] = {
    "package": package,
    "plugin": plugin,
    "settings": environment,
    "vLLM": release,
    "platform": platform,
    "kernel": kernel,
    "cost table": cost_table,
    "host work": host_work,
}


def _refusals(machine: Machine) -> list[tuple[LayerKind, str | None]]:
    """The kinds of layers that have a KV cache, and why an engine would not serve each."""
    kinds = [layer for layer in machine.layers if layer.attention]
    return [(kind, falls_back(kind, machine.on_cpu)) for kind in kinds]


def layers(machine: Machine) -> str:
    """How many layers of the model would be served; for each kind, ``Machine.served``."""
    machine.served = [
        {
            "kind": layer.name,
            "count": layer.count,
            "head_dim": layer.head_size,
            "kv_cache_dtype": layer.kv_cache_dtype,
            "falls_back": reason,
        }
        for layer, reason in _refusals(machine)
    ]
    count = sum(kind["count"] for kind in machine.served if kind["falls_back"] is None)
    return f"{count} of {sum(layer.count for layer in machine.layers)} would be served"


def strict(machine: Machine) -> str:
    """Whether the strict setting would refuse the model."""
    if not settings().strict:
        return "off: layers may fall back"
    refused = [layer["falls_back"] for layer in machine.served if layer["falls_back"]]
    if refused:
        raise PrefixShareError(
            f"a layer would fall back ({refused[0]}): unset VLLM_PREFIXSHARE_STRICT."
        )
    return "no layer falls back"


def _print(results: list[Result], machine: Machine, ok: bool) -> None:
    for result in results:
        print(f"{'ok' if result.ok else 'failed':<7} {result.check:<11} {result.says}")
    for layer in machine.served:
        reason = layer["falls_back"]
        fate = "served" if reason is None else f"keep vLLM's own backend ({reason})"
        cache = layer["kv_cache_dtype"]
        shape = f"head_dim {layer['head_dim']}" + (f", KV cache {cache}" if cache != "auto" else "")
        print(f"{layer['count']:>7} {layer['kind']}, {shape}: {fate}")
    if not ok:
        print("PREFIX_SHARE cannot run here")
    elif machine.model is not None and all(layer["falls_back"] for layer in machine.served):
        print("PREFIX_SHARE can be chosen, but would serve no layer of this model")
    else:
        print("PREFIX_SHARE can be chosen")
