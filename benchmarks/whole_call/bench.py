r"""A user's whole call: text in, text out, wall clock.

Each row is a configuration of the engine: FLASH_ATTN and PREFIX_SHARE, without and with what the
host does once per shared prefix (VLLM_PREFIXSHARE_PROMPTS), with vLLM's tokenizer and fastokens.
Each row measures all workloads in engines of its own: ``LLM.generate``, ``LLM.chat`` and
``LLM.beam_search`` in one, the host's time in a second that has one process, and ``vllm serve``
under a closed loop of clients. Answers are compared: the exit status is 1 if something differs that
must not, see ``whole_call/comparison.py``. Times are medians of --repeats runs, each with questions
that no earlier run had; the first run is reported separately.

    python -m benchmarks.whole_call --shape 8b --documents PAPER.txt ... \
        --lanes 4 --out benchmarks/published/whole_call.json

The documents are text files, or docstrings of Python's standard library without any. The model is a
checkpoint, or random weights in the shape of a model (--shape) with the tokenizer of --tokenizer.
Without either, a machine without a GPU runs the embedded model.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np

from benchmarks.engine.launch import WORKER
from benchmarks.engine.shapes import SHAPES
from benchmarks.support.option_types import count, names, positive, several
from benchmarks.support.program import (
    add_out,
    make_parser,
    one_sentence,
    recorded_command,
    visible_gpus,
)
from benchmarks.support.results import versions, write
from benchmarks.whole_call import serving
from benchmarks.whole_call.client import Served
from benchmarks.whole_call.comparison import compare, compare_served
from benchmarks.whole_call.measuring import Outcome, measure, measure_host
from benchmarks.whole_call.report import comparison_table, faults, parts_table, server_table, table
from benchmarks.whole_call.rows import ALL_ROWS, EXTRA_ROWS, ROWS, Row
from benchmarks.whole_call.texts import Tokenizer, asked, documents, question
from benchmarks.whole_call.workloads import (
    BEAMS,
    HOST,
    OFFLINE,
    SERVER,
    WORKLOADS,
    Run,
    Workloads,
)
from examples.embedded_model import embedded_model_path
from tests.support.dummy_model import write_llama_8b
from tests.support.engine import ONE_PROCESS, EngineProcess
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.planning.costs.lookup import gpu, has_gpu, processor

PROGRAM = "benchmarks.whole_call"

Entry = dict[str, Any]

#: Untimed workloads that compare rows in batches of the same composition.
TOGETHER, ALONE = "together", "server_alone"
NUM_TOGETHER, TOGETHER_TOKENS = 16, 32
#: Requests of a client of the server.
PER_CLIENT = 4
CHOICES = (*OFFLINE, *HOST, SERVER)
#: Workloads whose batches have the same composition in every row. In one process, rows of
#: the same backend also give the same tokens; two servers of unmodified vLLM may not.
SAME_TOKENS = (TOGETHER, *HOST)
SAME_BATCHES = (ALONE, *SAME_TOKENS)
#: Length of the built-in documents in tokens, on a GPU and on a CPU.
GPU_TOKENS, CPU_TOKENS = 34_000, 1_000
#: Tokens by which a prompt may be longer than the one that the context length is computed from.
SLACK = 256


class Bench:
    """The measurements of all rows, and their file.

    Args:
        model: folder with the model and its tokenizer.
        dummy: whether the model has random weights.
    """

    def __init__(
        self, args: argparse.Namespace, model: Path, dummy: bool, workloads: Workloads
    ) -> None:
        self._args, self._model, self._dummy, self._workloads = args, model, dummy, workloads
        self._lock = Lock()
        self._outcomes: dict[str, dict[str, Any]] = {}
        self.settings = engine_settings(args, self._dummy)
        names = list(args.rows)
        self.result: dict[str, Any] = {
            "baseline": names[0],
            "settings": self.settings,
            "workloads": titles(args, workloads),
            "rows": {name: self._described(ALL_ROWS[name]) for name in names},
        }

    def _described(self, row: Row) -> Entry:
        return {
            "backend": row.backend_on(self._args.gpu),
            "arguments": row.arguments(),
            "environment": row.environment(),
            "workloads": {},
            "failed": {},
        }

    def measure(self, name: str, device: str | None) -> None:
        """Measure all workloads of a row.

        Args:
            device: the GPU to use, as CUDA_VISIBLE_DEVICES names it; None for all.
        """
        row = ALL_ROWS[name]
        environment = row.environment()
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
            self.result["rows"][name]["gpu"] = device
        parts: dict[str, Callable[[str, Row, dict[str, str]], None]] = {}
        if any(workload in OFFLINE for workload in self._args.workloads):
            parts["offline"] = self._offline
        if any(workload in HOST for workload in self._args.workloads):
            parts["host"] = self._host
        if SERVER in self._args.workloads:
            parts["server"] = self._serve
        for part, run in parts.items():
            try:
                run(name, row, environment)
            except (PrefixShareError, RuntimeError, OSError) as e:
                reason = str(e).strip() or type(e).__name__
                self.result["rows"][name]["failed"][part] = reason
                print(f"{name}, {part}: failed: {reason[-500:]}", flush=True)
                self.save()

    def _engine(self, row: Row, environment: dict[str, str], **settings: Any) -> EngineProcess:
        settings = {**self.settings, **row.arguments(), **settings}
        engine = EngineProcess(row.backend_on(self._args.gpu), self._model, environment, **settings)
        if self._dummy:
            try:
                engine.collective_rpc("randomize_weights")
            except BaseException:
                engine.close()
                raise
        return engine

    def _offline(self, name: str, row: Row, environment: dict[str, str]) -> None:
        with self._engine(row, environment) as engine:
            self.result["rows"][name]["kv_cache_tokens"] = engine.kv_cache_tokens
            self._together(name, engine)
            for workload in (w for w in self._args.workloads if w in OFFLINE):
                self._repeat(name, workload, engine, measure)

    def _host(self, name: str, row: Row, environment: dict[str, str]) -> None:
        # without asynchronous scheduling, the executor returns when the GPU has finished
        own = {**environment, **ONE_PROCESS}
        with self._engine(row, own, async_scheduling=False) as engine:
            for workload in (w for w in self._args.workloads if w in HOST):
                self._repeat(name, workload, engine, measure_host)

    def _repeat(
        self,
        name: str,
        workload: str,
        engine: EngineProcess,
        function: Callable[[Any, Run], Outcome],
    ) -> None:
        outcomes: list[Outcome] = []
        for repeat in range(1 + self._args.repeats):
            with self._lock:
                run = self._workloads.run(workload, repeat)
            outcomes.append(engine.call(function, run))
        self._add(name, workload, entry_of(outcomes), outcomes)

    def _together(self, name: str, engine: EngineProcess) -> None:
        """Questions on a cached document, of which none is scheduled before all are queued."""
        text = self._workloads.document(0)
        prompts = [asked(text, 0, i) for i in range(NUM_TOGETHER)]
        engine.generate([asked(text, 0, NUM_TOGETHER)], 1, ignore_eos=True)
        batch = engine.generate(prompts, TOGETHER_TOKENS, together=True, ignore_eos=True)
        outcome = Outcome(
            seconds=batch.seconds,
            prompt_digests=(),
            token_ids=tuple(answer.token_ids for answer in batch.answers),
            texts=tuple(answer.text for answer in batch.answers),
            num_prompt_tokens=tuple(answer.num_prompt_tokens for answer in batch.answers),
            num_cached_tokens=tuple(answer.num_cached_tokens for answer in batch.answers),
        )
        self._add(name, TOGETHER, entry_of([outcome]), [outcome])

    def _serve(self, name: str, row: Row, environment: dict[str, str]) -> None:
        args = self._args
        text = self._workloads.document(0)

        def bodies(seed: int, count: int, tokens: int) -> list[dict[str, Any]]:
            questions = (question(text, seed, i) for i in range(count))
            return [serving.body_of(text, q, tokens) for q in questions]

        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "server.log")
            backend, settings = row.backend_on(args.gpu), {**self.settings, **row.arguments()}
            with serving.server(self._model, backend, environment, settings, log) as url:
                if self._dummy:
                    serving.post(f"{url}/collective_rpc", {"method": "randomize_weights"})
                outcome = serving.alone(url, bodies(2000, serving.NUM_ALONE, TOGETHER_TOKENS))
                self._add(name, ALONE, entry_of([outcome]), [outcome])
                for number, clients in enumerate(args.clients):
                    warm_up = bodies(2100 + number, clients, 4)
                    serving.under_load(url, warm_up, clients)
                    asked = bodies(2200 + number, clients * PER_CLIENT, args.tokens)
                    served = serving.under_load(url, asked, clients)
                    entry = {**serving.figures(served), "per_request": False}
                    self._add(name, f"{SERVER}{clients}", entry, served)

    def _add(self, name: str, workload: str, entry: Entry, outcomes: Sequence[Any]) -> None:
        """Keep a measurement, and print a line about it."""
        with self._lock:
            self._outcomes.setdefault(name, {})[workload] = outcomes
            self.result["rows"][name]["workloads"][workload] = entry
        factor, unit = (1e3, "ms per request") if entry["per_request"] else (1, "s")
        cached = f"{entry['cached_tokens']} of {entry['prompt_tokens']} prompt tokens cached"
        figure = f"{entry['seconds'] * factor:8.3f} {unit}"
        print(f"{name:25} {workload:14} {figure}, {cached}", flush=True)
        self.save()

    def save(self) -> None:
        """Compare what is there, and write the file."""
        with self._lock:
            self._compare()
            write(self._args.out, self.result)

    def _compare(self) -> None:
        rows = self.result["rows"]
        for name, measured in self._outcomes.items():
            backend = rows[name]["backend"]
            first = next(n for n in rows if rows[n]["backend"] == backend)
            for workload, outcomes in measured.items():
                entry = rows[name]["workloads"][workload]
                references = {"baseline": self.result["baseline"], "same_backend": first}
                for key, reference in references.items():
                    theirs = self._outcomes.get(reference, {}).get(workload)
                    if reference == name or theirs is None:
                        continue
                    if outcomes and isinstance(outcomes[0], Served):
                        compared = compare_served(outcomes, theirs)
                    else:
                        compared = compare(
                            outcomes,
                            theirs,
                            same_tokens=workload in SAME_TOKENS and key == "same_backend",
                            same_cached=workload in SAME_BATCHES,
                        )
                    entry[key] = compared.described()


def entry_of(outcomes: Sequence[Outcome]) -> Entry:
    """Figures of a workload's runs: medians of all but the first, or of the only one."""
    measured = outcomes[1:] or outcomes
    per_request = measured[0].executor_seconds is not None

    def seconds_of(outcome: Outcome) -> float:
        if outcome.executor_seconds is None:
            return outcome.seconds
        return (outcome.seconds - outcome.executor_seconds) / len(outcome.num_prompt_tokens)

    seconds = [seconds_of(outcome) for outcome in outcomes]
    last = measured[-1]
    answers = len(last.token_ids)
    entry: Entry = {
        "seconds": statistics.median(map(seconds_of, measured)),
        "per_request": per_request,
        "runs": seconds,
        "answers": answers,
        "answers_per_second": answers / statistics.median(o.seconds for o in measured),
        "prompt_tokens": sum(last.num_prompt_tokens),
        "cached_tokens": sum(last.num_cached_tokens),
        "prompts_sha256": hashed([o.prompt_digests for o in outcomes]),
        "answers_sha256": hashed([o.token_ids for o in outcomes]),
    }
    if first := [value for o in measured for value in o.first_token_seconds]:
        p50, last_one = np.percentile(first, [50, 100]).tolist()
        entry |= {"first_token_p50": p50, "first_token_last": last_one}
    if last.part_seconds:
        requests = len(last.num_prompt_tokens)
        entry["part_seconds"] = {
            part: statistics.median(o.part_seconds[part] for o in measured) / requests
            for part in last.part_seconds
        }
    return entry


def hashed(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def titles(args: argparse.Namespace, workloads: Workloads) -> list[dict[str, str]]:
    """Names and headings of the workloads, in the order of the table."""
    found = {TOGETHER: f"{NUM_TOGETHER} questions queued together, {TOGETHER_TOKENS} tokens"}
    for name, kind in WORKLOADS.items():
        found[name] = kind.title.format(workloads.count(kind.number))
    found[ALONE] = f"`vllm serve`, {serving.NUM_ALONE} requests one by one"
    for clients in args.clients:
        found[f"{SERVER}{clients}"] = (
            f"`vllm serve`, completions, {clients} clients, {clients * PER_CLIENT} requests"
        )
    return [{"name": name, "title": title} for name, title in found.items()]


def engine_settings(args: argparse.Namespace, dummy: bool) -> dict[str, Any]:
    """Arguments of every row's engine."""
    settings: dict[str, Any] = {
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_logprobs": 2 * max(BEAMS),
        "enable_prefix_caching": True,
        "enforce_eager": args.enforce_eager,
        "dtype": args.dtype,
        "seed": 0,
    }
    if args.gpu:
        settings["gpu_memory_utilization"] = args.memory
    if dummy:
        settings |= {"load_format": "dummy", **WORKER}
    return settings


def write_model(folder: Path, shape: str, layers: int | None, tokenizer: Path) -> Path:
    """A folder with a shape's ``config.json`` and the files of a tokenizer.

    Raises:
        PrefixShareError: ``tokenizer`` has no ``tokenizer.json``.
    """
    if not (tokenizer / "tokenizer.json").is_file():
        raise PrefixShareError(f"{tokenizer} has no tokenizer.json.")
    from tokenizers import Tokenizer as FastTokenizer

    words = FastTokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    fields = {**SHAPES[shape].fields, "vocab_size": -(-words // 64) * 64}
    config = tokenizer / "config.json"
    known = json.loads(config.read_text()) if config.is_file() else {}
    fields |= {key: known[key] for key in ("bos_token_id", "eos_token_id") if key in known}
    if layers is not None:
        fields["num_hidden_layers"] = layers
    for pattern in ("tokenizer*", "*.jinja", "special_tokens_map.json", "vocab*", "merges*"):
        for file in tokenizer.glob(pattern):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder)
    return write_llama_8b(folder, **fields)


def longest(workloads: Workloads, tokenizer: Tokenizer, names: Sequence[str], tokens: int) -> int:
    """Tokens of the longest request, with its answer."""
    found = len(tokenizer.ids(asked(workloads.document(0), 0, 0)))
    for name in (n for n in names if n != SERVER):
        for call in workloads.run(name, 0).timed:
            prompts: list[Any] = list(call.prompts)
            if isinstance(prompts[0], str):
                found = max(found, len(tokenizer.ids(max(prompts, key=len))))
            elif isinstance(prompts[0][0], dict):
                talk = max(prompts, key=lambda talk: sum(len(m["content"]) for m in talk))
                text = "\n".join(m["content"] for m in talk)
                found = max(found, len(tokenizer.ids(text)) + 16 * len(talk))
            else:
                found = max(found, *map(len, prompts))
    return found + max(tokens, TOGETHER_TOKENS) + SLACK


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; exits with status 2 where they are wrong."""
    parser = make_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--model", type=Path, help="checkpoint folder")
    add("--shape", choices=SHAPES, help="random weights in this shape instead of --model")
    add("--layers", type=int, help="fewer than the shape has")
    add("--tokenizer", type=Path, help="with --shape (default: the embedded model's folder)")
    add("--documents", type=Path, nargs="+", default=[], metavar="FILE", help="text files")
    add(
        "--document-tokens", type=int,
        help="cut each document to this length (default: whole files; built-in text: "
        f"{GPU_TOKENS}, on a CPU {CPU_TOKENS})",
    )  # fmt: skip
    rows = f"some of {','.join(ALL_ROWS)}; the first is the baseline"
    add("--rows", type=names(ALL_ROWS), help=f"{rows} (default: all but {','.join(EXTRA_ROWS)})")
    all_of = ",".join(CHOICES)
    add("--workloads", type=names(CHOICES), default=all_of, help=f"of {all_of} (default: all)")
    add("--tokens", type=count, default=64, help="output tokens of an answer")
    add("--repeats", type=count, default=2, help="measured runs after the first")
    add("--scale", type=positive, default=1.0, help="factor for the number of requests")
    add("--clients", type=several(count), default="64,8", help="a load for each number")
    add("--lanes", type=count, default=1, metavar="GPUS", help="rows side by side, one GPU each")
    add("--memory", type=float, default=0.9, help="part of the GPU's memory")
    add("--max-model-len", type=int, help="default: the longest request")
    add("--max-num-seqs", type=int, default=256)
    add("--dtype", default="auto")
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add_out(parser)
    args = parser.parse_args(argv)
    args.gpu = has_gpu()
    named = args.rows is not None
    args.rows = args.rows or list(ROWS)
    missing = {name: ALL_ROWS[name].unavailable() for name in args.rows}
    args.left_out = {name: reason for name, reason in missing.items() if reason}
    if named and args.left_out:
        name, reason = next(iter(args.left_out.items()))
        parser.error(f"row {name}: {reason}")
    args.rows = [name for name in args.rows if name not in args.left_out]
    if args.model and (args.shape or args.layers or args.tokenizer):
        parser.error("--shape, --layers and --tokenizer go without --model")
    if args.gpu and not (args.model or args.shape):
        parser.error("name a checkpoint with --model, or a shape with --shape")
    if absent := [file for file in args.documents if not file.is_file()]:
        parser.error(f"there is no file {absent[0]}")
    if args.document_tokens is None and not args.documents:
        args.document_tokens = GPU_TOKENS if args.gpu else CPU_TOKENS
    if args.lanes > 1 and len(visible_gpus()) < args.lanes:
        parser.error(f"--lanes {args.lanes}: here are {len(visible_gpus())} GPUs")
    return args


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All measurements.

    Args:
        folder: an empty folder for a model.

    Raises:
        PrefixShareError: there is no model.
        ValueError: the documents do not do.
    """
    model = args.model
    if args.shape:
        tokenizer = args.tokenizer or embedded_model_path()
        model = write_model(folder / "model", args.shape, args.layers, tokenizer)
    elif model is None:
        model = embedded_model_path()
    tokenizer = Tokenizer(model)
    texts = documents(args.documents, tokenizer, args.document_tokens)
    workloads = Workloads(texts, tokenizer.ids, args.tokens, args.scale)
    if args.max_model_len is None:
        args.max_model_len = longest(workloads, tokenizer, args.workloads, args.tokens)
    bench = Bench(args, model, bool(args.shape), workloads)
    layers = "" if args.layers is None else f" with {args.layers} layers"
    described = f"{SHAPES[args.shape].title}{layers}, random weights" if args.shape else model.name
    bench.result = {
        "command": recorded_command(PROGRAM),
        "device": gpu() if args.gpu else processor(),
        "lanes": args.lanes,
        "host_cores": os.cpu_count(),
        "versions": versions(),
        "model": described,
        "documents": [text.described() for text in texts],
        "tokens": args.tokens,
        "repeats": args.repeats,
        "scale": args.scale,
        "left_out": args.left_out,
        **bench.result,
    }
    free: SimpleQueue[str | None] = SimpleQueue()
    for device in visible_gpus()[: args.lanes] if args.lanes > 1 else [None]:
        free.put(device)

    def in_lane(name: str) -> None:
        device = free.get()
        try:
            bench.measure(name, device)
        finally:
            free.put(device)

    with ThreadPoolExecutor(args.lanes) as pool:
        list(pool.map(in_lane, args.rows))
    return bench.result


@one_sentence(PROGRAM, ValueError)
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    for name, reason in args.left_out.items():
        print(f"{name}: left out: {reason}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, Path(folder))
    for make in (table, server_table, parts_table, comparison_table):
        if made := make(result):
            print(f"\n{made}")
    wrong = faults(result)
    for fault in wrong:
        print(f"wrong: {fault}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
