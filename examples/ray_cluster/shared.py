"""The common part of the Ray examples: documents and questions, options, a cluster, and the table.

Functions that Ray runs elsewhere are in the examples themselves: Ray sends those along.
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other examples

import common

from vllm_prefixshare import PrefixShareError

HANDBOOK = Path(__file__).resolve().parents[1] / "document.md"
QUESTIONS = (
    "What is this text about?",
    "Which persons does it name?",
    "Which years does it name?",
    "What can visitors see?",
)


class Reads(NamedTuple):
    """What the decodes of one replica read: KV tokens per layer, and how many they saved."""

    read: float
    saved: float


# ---- options


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all Ray examples."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or folder (default: embedded model)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--documents", type=Path, help="folder of texts (default: the handbook)")
    parser.add_argument("--questions", type=Path, help="file with a question on each line")
    parser.add_argument("--max-tokens", type=int, default=16, help="length of an answer")
    parser.add_argument("--address", help="of a running Ray cluster (default: one of this machine)")
    return parser


def replica_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of examples with several replicas."""
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run it without affinity, too",
    )


def check_options(args: argparse.Namespace, module: str) -> None:
    """Fill in the model and its dtype, and import ``module`` of Ray.

    Raises:
        PrefixShareError: an option is not usable, or Ray is missing.
    """
    common.at_least(args, 1, "max_tokens")
    common.at_least(args, 16, "max_model_len")
    args.model = common.find_model(args.model)
    if common.on_cpu():
        os.environ.update({**common.ENVIRONMENT, **os.environ})
    try:
        importlib.import_module(module)
    except ImportError as e:
        raise PrefixShareError(
            f"{module} cannot be imported ({e}): run `pip install '.[ray]'` in the checkout."
        ) from None
    args.dtype = args.dtype or common.default_dtype()


def read_documents(folder: Path | None) -> dict[str, str]:
    """The texts of a folder by file name; without one, the handbook in four parts."""
    if folder is None:
        chapters = HANDBOOK.read_text(encoding="utf-8").split("\n## ")[1:]
        return {f"part {i + 1}": "\n\n".join(chapters[i::4])[:2600] for i in range(4)}
    found = sorted(folder.glob("*.txt")) + sorted(folder.glob("*.md"))
    if not found:
        raise PrefixShareError(f"--documents {folder} holds no .txt and no .md file.")
    return {path.name: common.read_text(path, "document") for path in found}


def prompt(text: str, question: str) -> str:
    """The prompt of a question. The document comes first, so that its questions share it."""
    return f"Document:\n\n{text}\n\nQuestion: {question}\nAnswer:"


def read_questions(path: Path | None) -> list[str]:
    """The questions of a file, which are asked about every document."""
    if path is None:
        return list(QUESTIONS)
    return [line for line in common.read_text(path, "question file").splitlines() if line.strip()]


# ---- Ray


def engine_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of vLLM's engine. What chooses PREFIX_SHARE is the first of them."""
    chosen: dict[str, Any] = {
        "attention_backend": "PREFIX_SHARE",
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
    }
    if common.on_cpu():  # replicas that start fast, and fit a small machine
        chosen.update(enforce_eager=True, max_num_batched_tokens=512, max_num_seqs=16)
        chosen.update(block_size=32)
    return chosen


def placement() -> dict[str, Any]:
    """What Ray reserves for a replica. By default it reserves a GPU, and waits for one for ever."""
    return {"bundle_per_worker": {"CPU": 0.5} if common.on_cpu() else {"GPU": 1}}


def start_ray(args: argparse.Namespace, settings: Mapping[str, str]) -> None:
    """Connect to Ray, or start it here. ``settings``: variables of all replicas.

    Ray passes a replica the variables that ``runtime_env`` names, and no others.

    Raises:
        PrefixShareError: there is no cluster at ``args.address``.
    """
    import ray

    variables = {"VLLM_PREFIXSHARE_SHARE": "always", **settings}
    if common.on_cpu():
        # no worker process beside the engine core, which would import vLLM once more
        one = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        variables = {**common.ENVIRONMENT, **one, **variables}
    here: dict[str, Any] = {"address": args.address}
    if args.address is None:
        here = {
            "include_dashboard": False,
            "_system_config": {"metrics_report_interval_ms": 1000},
        }
        if common.on_cpu():  # replicas share the cores of this machine, and Ray must not mind
            here["num_cpus"] = 2 * args.replicas + 2
    runtime_env = {"env_vars": variables}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    try:
        info = ray.init(runtime_env=runtime_env, **quiet, **here)
    except ConnectionError:
        raise PrefixShareError(
            f"no Ray cluster answers at --address {args.address}: start one with "
            "`ray start --head`, or leave the option out."
        ) from None
    for name in ("ray", "ray.data", "ray.serve"):
        logging.getLogger(name).setLevel("WARNING")
    logs = f"{info.address_info['session_dir']}/logs" if args.address is None else "its own logs"
    print(f"Ray runs; what replicas print goes to {logs}", flush=True)


def check_gpus(args: argparse.Namespace, option: str) -> None:
    """Refuse an option that needs as many GPUs as it says, where Ray, which is started, has fewer:
    it would wait for them for ever.

    Raises:
        PrefixShareError: naming the option.
    """
    import ray

    wanted, gpus = getattr(args, option), int(ray.cluster_resources().get("GPU", 0))
    if gpus < wanted and not common.on_cpu():
        name = option.replace("_", "-")
        raise PrefixShareError(f"--{name} {wanted} needs as many GPUs, and Ray has {gpus}.")


# ---- the table


def show_table(runs: Mapping[str, Mapping[str, Reads]]) -> int:
    """Print what each replica read in each run; the first run is the one with affinity.

    Returns:
        exit status: 1 if affinity saved nothing.

    Raises:
        PrefixShareError: no replica has counted anything in a run.
    """
    for name, replicas in runs.items():
        if not sum(reads.read for reads in replicas.values()):
            raise PrefixShareError(
                f"no replica counted what it read ({name}): see in the replicas' logs whether "
                "PREFIX_SHARE was chosen, and where its counters went."
            )
    print(f"\n{'':22}{'replica':14}{'KV tokens read':>16}{'saved':>12}{'share factor':>14}")
    totals = []
    for name, replicas in runs.items():
        totals.append(Reads(*map(sum, zip(*replicas.values(), strict=True))))
        for replica, reads in (*sorted(replicas.items()), ("all", totals[-1])):
            factor = (reads.read + reads.saved) / max(1, reads.read)
            print(f"{name:22}{replica:14}{reads.read:16,.0f}{reads.saved:12,.0f}{factor:14.2f}")
            name = ""
    if len(totals) < 2:
        return 0
    gain = totals[1].read / totals[0].read
    print(f"\n{next(iter(runs))}: {gain:.2f} times fewer KV tokens read")
    return 0 if gain > 1 else 1
