r"""The whole engine on a GPU: a backend of vLLM against PREFIX_SHARE, with the same settings.

Both engines live on the GPU at once and take turns; the waiting engine is stopped. (--apart: each
engine has its own GPU, and the long workloads run on both at the same time.) Unless a checkpoint is
given, the model has random weights in Llama-3.1-8B's shape, or in another of ``shapes.py``.
Greedy tokens are compared in an untimed call; the exit status is 1 if they differ where stock's
token had a clear lead. Where a model has experts, rounding may choose others, so that no lead
is clear: stock then also answers in two halves of the batch, and some requests alone, which rounds
otherwise from the first token on. The exit status is 1 if our answers have less than half as many
tokens in common with its own before they part as the worse of these two. That finds little where
these have less than a token in common.

    python -m benchmarks.engine --deft keywordToT.json --out benchmarks/published/engine.json
    python -m benchmarks.engine --baseline flashinfer --workloads doc32k,docs8k --out result.json

The baseline, "stock" below, is FLASH_ATTN unless --baseline names another. Cascade attention is
FLASH_ATTN's in vLLM 0.29 to 0.31, on the V1 runner, in both engines then, where vLLM's heuristics
choose it.

Rows of shared documents have milliseconds per output token while all requests decode. The documents
are cached, and each run continues them with other tokens. Other rows (GRPO, DeFT) start
with an empty cache and include prefill; they have the mean time between the tokens of a request,
and output tokens per second of the whole call. Questions on cached documents have the time of the
step that gives every request its only token. The floor is the time of as many requests with
16-token contexts in the stock engine, plus the time to read every KV token once at --bandwidth-tbs.
Host time is the time to build each engine's attention metadata, in decode-only steps that made no
plan. With --breakdown, further runs at the end, which are not timed, say how long the GPU's kernels
take in a decode step, by kind: see ``breakdown.py``.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import breakdown, report
from benchmarks.engine import workloads as work
from benchmarks.engine.launch import WORKER, started
from benchmarks.engine.report import Row
from benchmarks.engine.shapes import SHAPES
from benchmarks.engine.tables import engine_table
from benchmarks.support.baselines import BASELINES
from benchmarks.support.option_types import count, names, positive
from benchmarks.support.program import (
    add_out,
    add_resume,
    make_parser,
    one_sentence,
    recorded_command,
    visible_gpus,
)
from benchmarks.support.prompt_trees import FASTTREE, FLASHFORGE, PromptTree, shared_documents
from benchmarks.support.results import resumed, versions, write
from tests.support.dummy_model import write_llama_8b
from tests.support.engine import (
    PREFIX_SHARE,
    RUNNERS,
    STOCK,
    Batch,
    Divergence,
    EngineProcess,
    divergences,
)
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.planning.costs.lookup import processor

PROGRAM = "benchmarks.engine"

Engines = dict[str, EngineProcess]

#: of the workload of one of DeFT's recordings, before the file's name
OF_DEFT = "deft:"
#: workloads in which all requests decode at once
DECODED: dict[str, PromptTree] = {
    **work.FIXED, **work.SWEEP, **work.FEW_SHOT, **FASTTREE, **FLASHFORGE,
}  # fmt: skip
WORKLOADS = (*DECODED, *work.QUESTIONS, "grpo", "deft")
#: workloads that run only if they are named
ON_REQUEST = {*work.QUESTIONS, *work.SWEEP, *work.FEW_SHOT, *FASTTREE, *FLASHFORGE}
#: the KV cache's part of an engine's memory where both start together: they would count each
#: other's memory if they measured what is free
KV_PART = 0.65
#: context of the requests whose decode time is part of the floor, in tokens
FLOOR_CONTEXT = 16
#: tokens of each answer that are compared
CHECKED_TOKENS = 16
#: requests that stock also answers alone, of a model that has experts
ALONE = 32
#: timed runs of a first step, at least: the host's part of it varies by a quarter
FIRST_STEPS = 9
#: generated text is only counted
SAMPLING = {"ignore_eos": True, "detokenize": False}


class Bench:
    """Both engines, and the data that all rows share."""

    def __init__(self, args: argparse.Namespace, model: Path, engines: Engines) -> None:
        self.args, self.engines = args, engines
        self.config = json.loads((model / "config.json").read_text())
        self.vocab: int = self.config["vocab_size"]
        self._floors: dict[int, float] = {}

    def measure(self, name: str) -> Row:
        """The row of one workload.

        Raises:
            PrefixShareError: these engines cannot run the workload.
        """
        if name in work.QUESTIONS:
            return self.questions(work.QUESTIONS[name].scaled(self.args.scale))
        if name in DECODED:
            return self.fixed(DECODED[name].scaled(self.args.scale))
        if name.startswith(OF_DEFT):
            return self.deft(next(f for f in self.args.deft if OF_DEFT + f.stem == name))
        return self.grpo()

    def fixed(self, w: PromptTree) -> Row:
        """Decode time with all requests running."""
        tokens = self.args.tokens
        documents = w.cached_prompts(self.vocab)
        for engine in self.engines.values():
            engine.generate(documents, 1, **SAMPLING)
        agreement = self.compare(w.prompts(self.vocab, seed=0))
        found: dict[str, list[Batch]] = {name: [] for name in self.engines}
        metadata: dict[str, list[float]] = {name: [] for name in self.engines}
        for repeat in range(self.args.repeats):
            prompts = w.prompts(self.vocab, seed=repeat + 1)
            for name, engine in self.engines.items():
                # again, because runs in between may have evicted parts of the documents
                engine.generate(documents, 1, **SAMPLING)
                engine.collective_rpc("metadata_times")  # discards the times so far
                found[name].append(engine.generate(prompts, tokens, together=True, **SAMPLING))
                metadata[name] += engine.collective_rpc("metadata_times")[0]
        floor = None  # of layers with windows it would need each window's place
        if not self.config.get("sliding_window"):
            floor = self.floor(w.num_reqs) + self.kv_ms(w.distinct_tokens(tokens / 2))
        row = report.make_row(w.title, w.num_reqs, tokens, found, "decode")
        return {
            **row,
            "floor_ms": floor,
            "agreement": agreement,
            "metadata_us": {name: report.spread(times) for name, times in metadata.items()},
        }

    def breakdown(self, name: str) -> Row:
        """GPU time of a decode step by kind of kernel, of each engine, in a run that is not timed.

        Raises:
            PrefixShareError: nothing was recorded.
        """
        w = DECODED[name].scaled(self.args.scale)
        documents = w.cached_prompts(self.vocab)
        prompts = w.prompts(self.vocab, seed=self.args.repeats + 1)
        tokens = max(self.args.tokens, breakdown.TOKENS)
        found: Row = {}
        for title, engine in self.engines.items():
            engine.generate(documents, 1, **SAMPLING)
            engine.collective_rpc("begin_breakdown", w.num_reqs)
            engine.generate(prompts, tokens, together=True, **SAMPLING)
            found[title] = engine.collective_rpc("end_breakdown")[0]
            if reason := found[title].get("failed"):
                raise PrefixShareError(f"{title}: {reason}.")
        return found

    def questions(self, w: PromptTree) -> Row:
        """The time of the step that gives every request its only token."""
        documents = w.cached_prompts(self.vocab)
        for engine in self.engines.values():
            engine.generate(documents, 1, **SAMPLING)
        agreement = self.compare(w.prompts(self.vocab, seed=0))
        found: dict[str, list[Batch]] = {name: [] for name in self.engines}
        steps: dict[str, list[float]] = {name: [] for name in self.engines}
        for repeat in range(max(FIRST_STEPS, self.args.repeats)):
            prompts = w.prompts(self.vocab, seed=repeat + 1)
            for name, engine in self.engines.items():
                engine.generate(documents, 1, **SAMPLING)
                engine.collective_rpc("step_times")  # discards the times so far
                found[name].append(engine.generate(prompts, 1, together=True, **SAMPLING))
                steps[name].append(sum(engine.collective_rpc("step_times")[0]))
        row = report.make_row(w.title, w.num_reqs, 1, found, "first step", steps)
        return {**row, "agreement": agreement}

    def grpo(self) -> Row:
        """Samples of prompts that grow from an empty cache. Sampled tokens are not compared."""
        w, tokens = work.GRPO.scaled(self.args.scale), self.args.grpo_tokens
        sampling = {"n": work.GRPO_SAMPLES, "temperature": 1.0, **SAMPLING}
        prompts = w.cached_prompts(self.vocab)
        num_reqs = len(w.leaves) * work.GRPO_SAMPLES
        found = self.alternate(lambda e: [e.generate(prompts, tokens, together=True, **sampling)])
        row = report.make_row(f"{w.title} + {tokens}", num_reqs, tokens, found, "whole call")
        if any(row[name]["preemptions"] for name in self.engines):
            return row  # no floor, because the requests did not decode all at once
        held = len(w.leaves) * w.document_tokens + num_reqs * tokens / 2
        return {**row, "floor_ms": self.floor(num_reqs) + self.kv_ms(held)}

    def deft(self, file: Path) -> Row:
        """Tree-of-thoughts runs of one recording, level by level. Tokens are not compared: a
        level's tokens are part of the next level's prompts, so one tie changes the prompts.
        """
        trees = work.thought_trees(file, self.args.deft_trees)
        tokens = max(n["value"] for tree in trees for n in tree)

        def replay(engine: EngineProcess) -> list[Batch]:
            def generate(prompts: Any, lengths: Any) -> Batch:
                return engine.generate(prompts, lengths, together=True, **SAMPLING)

            return work.replay_thoughts(trees, generate, self.vocab)

        found = self.alternate(replay)
        branches = max(len(b.answers) for b in found[STOCK])
        title = f"DeFT {file.stem}, {len(trees)} trees"
        return report.make_row(title, branches, tokens, found, "whole call")

    def alternate(self, run: Callable[[EngineProcess], list[Batch]]) -> dict[str, list[Batch]]:
        """Call ``run`` on both engines in turn, with an empty prefix cache; at the same time if
        each engine has its own GPUs.
        """

        def one(engine: EngineProcess) -> list[Batch]:
            engine.reset_prefix_cache()
            return run(engine)

        with ThreadPoolExecutor(len(self.engines) if self.args.apart else 1) as pool:
            runs = {name: pool.submit(one, engine) for name, engine in self.engines.items()}
            return {name: batches.result() for name, batches in runs.items()}

    def floor(self, num_reqs: int) -> float:
        """Milliseconds per token of ``num_reqs`` requests with hardly any context."""
        if num_reqs not in self._floors:
            w = shared_documents("floor", num_reqs, 1, 0, FLOOR_CONTEXT)
            times = []
            for repeat in range(self.args.repeats):
                prompts = w.prompts(self.vocab, seed=repeat)
                batch = self.engines[STOCK].generate(
                    prompts, self.args.tokens, together=True, **SAMPLING
                )
                times.append(report.decode_ms(batch))
            self._floors[num_reqs] = statistics.median(times)
        return self._floors[num_reqs]

    def kv_ms(self, tokens: float) -> float:
        """Milliseconds to read ``tokens`` KV tokens of all layers once."""
        rate = self.args.bandwidth_tbs * 1e12 * self.args.tensor_parallel_size
        size = 1 if self.args.kv_cache_dtype == "fp8" else 2
        return tokens * work.kv_bytes_per_token(self.config, size) / rate * 1e3

    def compare(self, prompts: list[list[int]]) -> Row:
        """Compare greedy tokens of both engines. The run is untimed, because log-probabilities slow
        decoding.

        gaps: stock's log-probability of its best token minus that of its second best, in nats.
        """
        tokens = min(CHECKED_TOKENS, self.args.tokens)

        def answer(engine: EngineProcess, asked: list[list[int]]) -> Batch:
            return engine.generate(asked, tokens, gaps=True, **SAMPLING)

        batches = {name: answer(engine, prompts) for name, engine in self.engines.items()}
        stock = batches[STOCK]
        parted = divergences(batches[PREFIX_SHARE], stock)
        gaps = [gap for answer in stock.answers for gap in answer.top2_gaps]
        agreement = {
            "requests": len(prompts),
            "tokens": tokens,
            **report.agreement(batches[PREFIX_SHARE], stock),
            "median_gap_of_all_tokens": statistics.median(gaps),
        }
        if not work.has_experts(self.config):
            return agreement
        middle = len(prompts) // 2
        stock_again = {
            "halves": [prompts[:middle], prompts[middle:]],
            "alone": [[prompt] for prompt in prompts[:ALONE]],
        }
        in_common, gaps_of_stock = {}, {}
        for name, parts in stock_again.items():
            answers = [a for part in parts for a in answer(self.engines[STOCK], part).answers]
            first = replace(stock, answers=stock.answers[: len(answers)])
            of_stock = divergences(replace(stock, answers=tuple(answers)), first)
            in_common[name] = common_tokens(of_stock, len(answers), tokens)
            gaps_of_stock[name] = max((d.gap for d in of_stock), default=0.0)
        return {
            **agreement,
            "tokens_in_common": common_tokens(parted, len(prompts), tokens),
            "tokens_in_common_stock": in_common,
            "largest_gap_stock": gaps_of_stock,
        }


def common_tokens(parted: list[Divergence], requests: int, tokens: int) -> float:
    """Mean number of tokens of a request before two answers part."""
    return (sum(d.position for d in parted) + (requests - len(parted)) * tokens) / requests


def is_wrong(agreement: Row, max_gap: float) -> bool:
    """Whether answers differ by more than rounding explains."""
    if (of_stock := agreement.get("tokens_in_common_stock")) is not None:
        return bool(agreement["tokens_in_common"] < min(of_stock.values()) / 2)
    return bool(agreement["largest_gap"] > max_gap)


def start(
    args: argparse.Namespace, model: Path, own_weights: bool, stack: ExitStack
) -> tuple[Engines, Row]:
    """Both engines, stopped, and the GPU memory that they hold; ``stack`` closes them."""
    config = json.loads((model / "config.json").read_text())
    settings: Row = {
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "enable_prefix_caching": True,
        "tensor_parallel_size": args.tensor_parallel_size,
        "kv_cache_dtype": args.kv_cache_dtype,
        "skip_tokenizer_init": True,
        **WORKER,
    }
    stock: Row = {}
    if "linear_num_value_heads" in config:
        # FlashInfer's kernel for the prefill of gated delta nets need not be installed
        settings["additional_config"] = {"gdn_prefill_backend": "triton"}
    if args.cuda:
        settings["gpu_memory_utilization"] = args.memory
        if args.start_together and not args.apart:
            settings["kv_cache_memory_bytes"] = int(KV_PART * args.memory * gpu_bytes())
        stock = stock_arguments(args.baseline, config)
    if own_weights:
        settings["load_format"] = "dummy"
    # both engines have the runner that the baseline needs
    environment = BASELINES[args.baseline].environment()
    if args.runner:
        environment |= RUNNERS[args.runner.upper()]
    if args.batch_invariant:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    used: dict[str, float] = {}

    names = (STOCK, PREFIX_SHARE)

    def one(name: str) -> EngineProcess:
        own: dict[str, str] = {}
        if args.apart:
            first = names.index(name) * args.tensor_parallel_size
            gpus = visible_gpus()[first : first + args.tensor_parallel_size]
            own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        before = used_gib(args)
        extra = stock if name == STOCK else {}
        engine = EngineProcess(name, model, {**environment, **own}, pause=True, **settings, **extra)
        used[name] = used_gib(args) - before
        if own_weights:
            engine.collective_rpc("randomize_weights")
        return engine

    starts = {name: partial(one, name) for name in names}
    engines: Engines = stack.enter_context(started(starts, at_once=args.start_together))
    memory: Row = {
        "kv_cache_tokens": {n: e.kv_cache_tokens for n, e in engines.items()},
        "kv_cache_ratio": engines[PREFIX_SHARE].kv_cache_tokens / engines[STOCK].kv_cache_tokens,
        "started_together": args.start_together and not args.apart,
        "used_gib": used if args.cuda and not args.start_together else None,
    }
    return engines, {
        "settings": {**settings, **environment},
        "apart": args.apart,
        "memory": memory,
    }


def stock_arguments(baseline: str, config: Row) -> Row:
    """Engine arguments of the baseline on a GPU.

    Args:
        baseline: a key of ``BASELINES``.
        config: of the model.

    Raises:
        PrefixShareError: the model's layers have no such backend.
    """
    chosen = BASELINES[baseline]
    if not config.get("kv_lora_rank"):
        return {"attention_backend": chosen.backend, **chosen.arguments()}
    if baseline != "flash_attn":
        raise PrefixShareError(f"MLA layers have no baseline {baseline}: leave --baseline out.")
    return {"attention_backend": "FLASH_ATTN_MLA"}


def used_gib(args: argparse.Namespace) -> float:
    """GPU memory in use by all processes."""
    if not args.cuda:
        return 0.0
    pairs = map(torch.cuda.mem_get_info, range(gpus_needed(args)))
    return sum(total - free for free, total in pairs) / 2**30


def gpu_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def gpus_needed(args: argparse.Namespace) -> int:
    return int(args.tensor_parallel_size) * (2 if args.apart else 1)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--model", type=Path, help="checkpoint folder (default: Llama-3.1-8B's shape)")
    usual = "no questions, sweeps and papers' workloads; deft if its files are given"
    add("--workloads", type=names(WORKLOADS), help=f"of {','.join(WORKLOADS)} (default: {usual})")
    add("--tokens", type=int, default=64, help="output tokens of shared documents")
    add("--repeats", type=count, default=3, help="timed runs of shared documents")
    add(
        "--breakdown",
        action="store_true",
        help="profile the kernels of a decode step in runs of their own (shared documents)",
    )
    # more than fits on one H200 beside another engine, so that both pre-empt
    add("--grpo-tokens", type=count, default=4096, help="output tokens of each GRPO sample")
    add("--deft", type=Path, nargs="+", help="DeFT's recorded *ToT.json, a row for each")
    add("--deft-trees", type=count, default=4, help="number of the largest runs, replayed at once")
    add("--shape", choices=SHAPES, default="8b", help="without --model")
    add("--layers", type=count, help="fewer than the shape has, without --model")
    add("--runner", choices=("v1", "v2"), help="vLLM's model runner (default: its own choice)")
    add("--baseline", type=str.lower, choices=BASELINES, default="flash_attn")
    add("--batch-invariant", action="store_true", help="both engines: VLLM_BATCH_INVARIANT=1")
    add("--tensor-parallel-size", type=int, default=1)
    add("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    add("--max-model-len", type=int, default=36864)
    add("--max-num-seqs", type=int, default=1024)
    add("--memory", type=float, default=0.45, help="each engine's part of the GPU's memory")
    add("--start-together", action="store_true", help="faster, with KV caches of a set size")
    add("--apart", action="store_true", help="each engine on its own GPUs: raise --memory")
    add("--bandwidth-tbs", type=positive, default=4.35, help="TB/s for the floor (an H200's)")
    add(
        "--max-gap",
        type=float,
        help="nats; tokens may differ at smaller gaps (0.3, with an fp8 KV cache 0.5)",
    )
    add("--scale", type=float, default=1.0, help="factor for smaller documents and batches")
    add_out(parser)
    add_resume(parser)
    args = parser.parse_args(argv)
    if args.workloads is None:
        others = [n for n in WORKLOADS if n not in ON_REQUEST]
        args.workloads = [n for n in others if n != "deft" or args.deft]
    if "deft" in args.workloads and not args.deft:
        parser.error("the workload deft is recorded: name its files with --deft")
    args.workloads = [
        each
        for name in args.workloads
        for each in ([OF_DEFT + f.stem for f in args.deft] if name == "deft" else [name])
    ]
    if args.tokens < 2 or not 0 < args.scale <= 1:
        parser.error("--tokens must be 2 or more, --scale in (0, 1]")
    if args.model and (args.layers or args.shape != "8b"):
        parser.error("--shape and --layers go without --model")
    if args.max_gap is None:
        # in runs of benchmarks.quality.fidelity, TRITON_ATTN differed from FLASH_ATTN at gaps of
        # 0.25 to 0.28; with fp8, whose keys and values keep 3 bits for 7, FLASH_ATTN rounds its
        # weights too
        args.max_gap = 0.5 if args.kv_cache_dtype == "fp8" else 0.3
    for name in args.workloads:
        if (needed := longest(name, args)) > args.max_model_len:
            parser.error(f"the workload {name} needs --max-model-len {needed} or more")
    args.cuda = torch.cuda.is_available()
    check_baseline(parser, args)
    if args.apart and len(visible_gpus()) < gpus_needed(args):
        parser.error(f"--apart needs {gpus_needed(args)} GPUs, here are {len(visible_gpus())}")
    return args


def check_baseline(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with one sentence unless vLLM has the baseline here."""
    baseline = BASELINES[args.baseline]
    if reason := baseline.unavailable():
        parser.error(f"--baseline {args.baseline}: {reason}")
    if baseline.cascade and args.runner == "v2":
        parser.error("--baseline cascade needs the V1 runner: leave --runner out")
    if args.baseline != "flash_attn" and not args.cuda:
        parser.error(f"--baseline {args.baseline} needs a GPU: leave it out for CPU_ATTN")


def longest(name: str, args: argparse.Namespace) -> int:
    """Tokens of the workload's longest request; 0 where it is made to fit."""
    shared = {**DECODED, **work.QUESTIONS}.get(name)
    if shared is None:
        return 0
    w = shared.scaled(args.scale)
    answer = 1 if name in work.QUESTIONS else args.tokens
    if args.breakdown and name in DECODED:
        answer = max(answer, breakdown.TOKENS)
    return w.document_tokens + w.own_tokens + answer


def fields(args: argparse.Namespace) -> Row:
    """The model's configuration, where it differs from Llama-3.1-8B's."""
    changed = dict(SHAPES[args.shape].fields)
    if args.layers is not None:
        changed["num_hidden_layers"] = args.layers
        if "layer_types" in changed:
            changed["layer_types"] = changed["layer_types"][: args.layers]
    return changed


def described(args: argparse.Namespace) -> str:
    """The model with random weights, in words."""
    fewer = "" if args.layers is None else f" with {args.layers} layers"
    return f"{SHAPES[args.shape].title}{fewer}, random weights, bfloat16"


def header(args: argparse.Namespace) -> Row:
    """What is known of a run before its engines start."""
    return {
        "command": recorded_command(PROGRAM),
        "gpu": torch.cuda.get_device_name() if args.cuda else processor(),
        "versions": versions(),
        "model": args.model.name if args.model else described(args),
        "baseline": args.baseline,
        "repeats": args.repeats,
        "bandwidth_tbs": args.bandwidth_tbs,
        "max_gap": args.max_gap,
        "scale": args.scale,
    }


def last_line(error: Exception) -> str:
    """What an exception of an engine's process ends with."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@one_sentence(PROGRAM)
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with ExitStack() as stack:
        model = args.model
        if model is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = write_llama_8b(folder, **fields(args))
        elif not (model / "config.json").is_file():
            raise PrefixShareError(f"model {model} is not a checkpoint folder.")
        result = header(args)
        rows = resumed(args.out, result, "rows") if args.resume else []
        engines, settings = start(args, model, args.model is None, stack)
        result |= {**settings, "rows": rows, "left_out": {}}
        print(f"{result['gpu']}; {result['model']}", flush=True)
        bench = Bench(args, model, engines)
        timed: dict[str, Row] = {row["name"]: row for row in rows}
        for name in (n for n in args.workloads if n not in timed):
            try:
                row = {"name": name, **bench.measure(name)}
            except (PrefixShareError, RuntimeError) as e:  # the engine may have ended
                result["left_out"][name] = last_line(e)
                print(f"{name}: left out: {last_line(e)}", flush=True)
            else:
                rows.append(row)
                timed[name] = row
                print(report.line(row), flush=True)
            write(args.out, result)
        if args.breakdown:  # last, because a profiler may leave later steps slower
            result["no_breakdown"] = {}
            for name in (n for n, row in timed.items() if n in DECODED and not row["breakdown"]):
                try:
                    timed[name]["breakdown"] = bench.breakdown(name)
                except (PrefixShareError, RuntimeError) as e:
                    result["no_breakdown"][name] = last_line(e)
                    print(f"{name}: no breakdown: {last_line(e)}", flush=True)
                else:
                    print(report.breakdown_line(timed[name]), flush=True)
                write(args.out, result)
    print(f"\n{engine_table(result)}")
    checked = [row["agreement"] for row in result["rows"] if row["agreement"]]
    wrong = any(is_wrong(agreement, args.max_gap) for agreement in checked)
    if wrong:
        print("tokens part by more than rounding: see the last column", file=sys.stderr)
    return int(wrong or bool(result["left_out"]))


if __name__ == "__main__":
    sys.exit(main())
