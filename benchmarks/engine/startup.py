"""The time in which an engine starts: stock FLASH_ATTN and PREFIX_SHARE in turns.

    python -m benchmarks.engine.startup --out startup.json

A fresh start has empty caches: vLLM's, Triton's, Inductor's, Numba's and this project's. A warm
start uses the caches that the fresh start of the same backend left. Each start is a separate
process, timed from its launch to the moment when ``LLM(...)`` has returned. The model has
Llama-3.1-8B's shape and random weights, unless a checkpoint is given.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.support.program import add_out, environment, make_parser
from benchmarks.support.results import versions, write
from tests.support.dummy_model import write_llama_8b

PROGRAM = "benchmarks.engine.startup"
BACKENDS = {"stock": "FLASH_ATTN", "ours": "PREFIX_SHARE"}
#: The folder VLLM_PREFIXSHARE_CACHE is locked while planning is compiled: a start would wait for
#: another's.
FOLDERS = (
    "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR",
    "VLLM_PREFIXSHARE_CACHE", "CUDA_CACHE_PATH", "TMPDIR",
)  # fmt: skip
START = """
import json, sys
from vllm import LLM
LLM(**json.loads(sys.argv[1]))
print("started", flush=True)
"""


def seconds_to_start(backend: str, options: dict[str, Any], caches: Path, log: Path) -> float:
    """Seconds until an engine is ready; the engine is then ended.

    Raises:
        RuntimeError: the engine did not start.
    """
    options = {**options, "attention_backend": BACKENDS[backend]}
    own = {name: caches / name.lower() for name in FOLDERS}
    own["TMPDIR"].mkdir(parents=True, exist_ok=True)
    env = {**environment(), **{name: str(folder) for name, folder in own.items()}}
    began = time.perf_counter()
    with (
        log.open("a", buffering=1) as errors,
        subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(options)],
            env=env, stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        seconds = None
        for line in process.stdout:
            errors.write(line)  # vLLM says how long each phase took
            if line.startswith("started"):
                seconds = time.perf_counter() - began
    if seconds is None:
        raise RuntimeError(f"{backend} did not start: see {log}.")
    return seconds


def main() -> int:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: random weights)")
    parser.add_argument("--fresh", type=int, default=3, help="fresh starts of each backend")
    parser.add_argument("--warm", type=int, default=5, help="warm starts of each backend")
    parser.add_argument("--log", type=Path, default=Path("startup.log"))
    add_out(parser)
    args = parser.parse_args()
    times: dict[str, dict[str, list[float]]] = {
        kind: {backend: [] for backend in BACKENDS} for kind in ("fresh", "warm")
    }
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or write_llama_8b(Path(scratch))
        # half of the memory, which changes no time: others may use the same GPU
        options: dict[str, Any] = {
            "model": str(model),
            "max_model_len": 8192,
            "gpu_memory_utilization": 0.5,
        }
        if not args.model:
            options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        starts = [("fresh", i) for i in range(args.fresh)] + [("warm", 0)] * args.warm
        for kind, i in starts:
            for backend in BACKENDS:
                caches = Path(scratch, f"{backend}-{i}")
                seconds = seconds_to_start(backend, options, caches, args.log)
                times[kind][backend].append(round(seconds, 2))
                print(f"{kind:6} {backend:6} {seconds:6.1f} s", flush=True)
                if args.out:  # each start takes a minute: keep those made if one fails
                    write(args.out, {"versions": versions(), "seconds": times})
    for kind, of in times.items():
        if of["ours"]:
            stock, ours = (statistics.median(of[backend]) for backend in BACKENDS)
            print(f"{kind}: stock {stock:.1f} s, ours {ours:.1f} s, {ours - stock:+.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
