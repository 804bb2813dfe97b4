"""Write the tables and charts of the docs from the benchmarks' JSON; ``--check`` only compares.

python -m benchmarks.tables
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine import tables as engine
from benchmarks.kernel import scale_tables as scale
from benchmarks.kernel import tables as kernel
from benchmarks.papers import PAPERS
from benchmarks.papers import tables as papers
from benchmarks.quality import tables as quality
from benchmarks.support import published
from benchmarks.support.charts import light_and_dark
from benchmarks.support.program import ROOT, make_parser
from benchmarks.support.published import Result
from benchmarks.whole_call import report

PROGRAM = "benchmarks.tables"


class Section(NamedTuple):
    """A part of a generated page: heading, name of the results, function that writes them."""

    title: str
    results: str
    write: Callable[[Result], str]


class GeneratedPage(NamedTuple):
    """A Markdown file of ``benchmarks/published/`` that consists of tables alone."""

    title: str
    intro: str
    sections: tuple[Section, ...]


TREES = (
    "A workload `1,4,16_1024,256,64` is a tree with 1, 4 and 16 nodes on its levels, of 1024, 256 "
    "and 64 tokens each; the nodes of the last level are the requests. The roofline is the larger "
    "of two times: reading every KV token and query once and writing the output, and the "
    "multiplications. The gain is the fastest peer's time over ours."
)
#: the run on all of FastTree's trees, or the one that has some of them
FASTTREE_KERNELS = "kernel_fasttree" if published.exists("kernel_fasttree") else "kernel"
#: file in benchmarks/published -> what it holds
PAGES = {
    "engine.md": GeneratedPage(
        "Engine",
        "Baseline: the backend that vLLM chooses by default, in the same engine with the same "
        "settings. [Performance](../../docs/performance.md) summarises these tables.",
        (
            Section("Llama-3.1-8B", "engine", engine.engine_table),
            Section("Other baselines", "engine", engine.opponents_table),
            Section("Torch 2.14 and Triton 3.8", "engine_newest", engine.engine_table),
            Section("GRPO with long samples", "engine_grpo", engine.engine_table),
            Section("Documents of 8k to 120k tokens", "engine_sweep", engine.breakdown_table),
            Section(
                "FastTree's workloads, Mistral-7B",
                "engine_fasttree_mistral",
                engine.breakdown_table,
            ),
            Section(
                "FastTree's workloads, Llama-2-7B", "engine_fasttree_llama2", engine.engine_table
            ),
            Section("Tensor parallelism, 8B", "engine_tp2", engine.engine_table),
            Section("Tensor parallelism, 70B", "engine_tp2_70b", engine.engine_table),
            Section("An fp8 KV cache", "engine_fp8", engine.engine_table),
            Section("DeepSeek-V2-Lite", "engine_mla", engine.engine_table),
            Section("gpt-oss", "engine_gpt_oss", engine.engine_table),
            Section(
                "gpt-oss with 4 of 32 experts", "engine_gpt_oss_4_experts", engine.engine_table
            ),
            Section("Qwen3-Next", "engine_qwen3_next", engine.engine_table),
            Section("Gemma-3-12B", "engine_gemma3", engine.engine_table),
            Section("Batch invariance", "engine_invariant", engine.engine_table),
            Section("H100", "engine_h100", engine.engine_table),
            Section("CPU", "cpu", engine.cpu_table),
            Section("Start-up", "startup", engine.startup_table),
        ),
    ),
    "kernel.md": GeneratedPage(
        "Attention of one layer",
        f"{TREES} [Performance](../../docs/performance.md) summarises these tables.",
        (
            Section("Every cell", "kernel", kernel.kernel_table),
            Section("Other workloads", "kernel_workloads", kernel.kernel_table),
            Section("Batches of any size", "kernel_batches", kernel.kernel_table),
            Section("H100", "kernel_h100", kernel.kernel_table),
            Section("Torch 2.14 and Triton 3.8", "kernel_newest", kernel.kernel_table),
            Section(
                "The Hopper kernel under two Tritons", "kernel_triton/3.8.0", kernel.triton_table
            ),
            Section("Batch invariance", "kernel_invariant", kernel.invariant_table),
            Section(
                "The first step after a prefix hit", "kernel_first_step", kernel.first_step_table
            ),
            Section("Sliding windows", "kernel_windows_1024_256", kernel.windows_table),
            Section("An fp8 KV cache", "kernel_fp8", kernel.kernel_table),
            Section("Attention sinks", "kernel_sinks", kernel.kernel_table),
            Section("Soft cap", "kernel_soft_cap", kernel.kernel_table),
            Section("ALiBi", "kernel_alibi", kernel.kernel_table),
            Section("head_dim 512", "kernel_head_dim_512", kernel.kernel_table),
            Section("Hybrid models", "kernel_hybrid", kernel.kernel_table),
            Section("MLA", "kernel_mla", kernel.kernel_table),
            Section("MLA with more heads", "kernel_mla_heads", kernel.kernel_table),
            Section("MLA with an fp8 KV cache", "kernel_mla_fp8", kernel.kernel_table),
            Section("MLA with drafts", "kernel_mla_drafts", kernel.kernel_table),
            Section(
                "MLA with drafts and an fp8 KV cache", "kernel_mla_drafts_fp8", kernel.kernel_table
            ),
            Section("What each part of planning is worth", "ablation", kernel.ablation_table),
        ),
    ),
    "kernel_resources.md": GeneratedPage(
        "Registers, spills and shared memory",
        "Variants of plain attention that the backend can choose, compiled for each GPU by each "
        "Triton, without a GPU (`make kernels`). An entry has the maximum registers per thread / "
        "bytes spilled per thread / KiB of shared memory per CTA over all heads and dtypes, and in "
        "brackets the number of binaries.",
        (Section("Binaries", "kernel_resources", kernel.resources_table),),
    ),
    "fidelity.md": GeneratedPage(
        "Fidelity and soak tests",
        "[Fidelity](../../docs/fidelity.md) explains these tables.",
        (
            Section("Accuracy with a real model", "fidelity_cpu", quality.accuracy_table),
            Section("Soak tests", "soak_server", quality.soak_table),
        ),
    ),
    "whole_call.md": GeneratedPage(
        "Whole calls",
        "[Whole-call performance](../../docs/whole-call.md) explains these tables.",
        (
            Section("How calls were measured", "whole_call", report.whole_call_how),
            Section("Calls", "whole_call", report.table),
            Section("Server", "whole_call", report.server_table),
            Section("Answers with equal tokens", "whole_call", report.equal_answers),
            Section("Torch 2.14 and Triton 3.8", "whole_call_newest", report.how_and_calls),
            Section("How host time was measured", "whole_call_host", report.whole_call_how),
            Section("Host time per request by part", "whole_call_host", report.parts_table),
            Section("How it was measured on one CPU", "whole_call_host_cpu", report.whole_call_how),
            Section("Host time on one CPU", "whole_call_host_cpu", report.parts_table),
        ),
    ),
    "order.md": GeneratedPage(
        "Order of waiting requests",
        "[Ordering](../../docs/ordering.md) explains these tables.",
        (
            Section(
                "A KV cache for half of the documents",
                "order",
                engine.order_table,
            ),
            Section("Other cache sizes", "order_sizes", engine.order_table),
            Section("Poisson arrivals", "arrivals", engine.arrivals_table),
            Section("At 0.95 load", "arrivals_95", engine.arrivals_table),
        ),
    ),
    "scale.md": GeneratedPage(
        "KV in shards",
        "[The deep dive on sharded KV](../../docs/notes/sharded-kv.md) explains these tables.",
        (
            Section("Two GPUs", "scale", scale.scale_measured_table),
            Section("By block size", "scale_blocks_16", scale.scale_blocks_table),
            Section(
                "Decode context parallelism", "context_parallel", engine.context_parallel_table
            ),
            Section("Model", "kernel", scale.scale_table),
        ),
    ),
    "papers.md": GeneratedPage(
        "The papers' figures",
        "[The deep dive on the papers](../../docs/notes/papers.md) explains how to read and "
        "reproduce these tables.",
        (
            *(
                Section(paper, "papers/flashforge-figure-6", partial(papers.papers_table, paper))
                for paper in PAPERS
            ),
            Section(
                "Kernels of FastTree's figure 9", FASTTREE_KERNELS, papers.fasttree_kernels_table
            ),
        ),
    ),
}
#: short tables inside hand-written pages: place -> (file, results, the function that writes it)
EMBEDDED = {
    "headline": ("README.md", "engine", engine.headline),
    "chart": ("README.md", "whole_call", report.chart_configuration),
    "engine": ("docs/performance.md", "engine", engine.engine_short_table),
    "kernel": ("docs/performance.md", "kernel", kernel.kernel_short_table),
    "whole call": ("docs/whole-call.md", "whole_call", report.whole_call_table),
    "serving": ("docs/whole-call.md", "whole_call", report.server_table),
    "host": ("docs/whole-call.md", "whole_call_host", report.host_table),
    "peers": ("README.md", "kernel", kernel.peers_table),
    "losses": ("docs/notes/papers.md", "papers/flashforge-figure-5", papers.losses_table),
}


def page_text(page: GeneratedPage) -> str:
    """A generated page, with a section for each published result."""
    parts = [
        f"# {page.title}",
        "Written by `python -m benchmarks.tables` from the JSON next to it.",
    ]
    parts.append(page.intro)
    for section in page.sections:
        if published.exists(section.results):
            text = section.write(published.load(section.results))
            parts += [f"## {section.title}", text or "Not measured in this run."]
    return "\n\n".join(parts) + "\n"


def fresh_files() -> dict[Path, str]:
    """Every generated file as it should be.

    Raises:
        ValueError: a document has no place for its table.
    """
    files = {
        published.FOLDER / name: page_text(page)
        for name, page in PAGES.items()
        if any(published.exists(section.results) for section in page.sections)
    }
    for name, (file, results, write) in EMBEDDED.items():
        if not published.exists(results):
            continue
        path = ROOT / file
        block = f"<!-- table {name} -->\n{write(published.load(results))}\n<!-- end -->"
        files[path], found = re.subn(
            rf"<!-- table {name} -->.*?<!-- end -->",
            lambda _, b=block: b,
            files.get(path) or path.read_text(),
            flags=re.DOTALL,
        )
        if not found:
            raise ValueError(f"{file} has no place for the table {name}: add <!-- table {name} -->")
    for name, picture in papers.pictures().items():
        files[published.FOLDER / "images" / name] = picture
    both = light_and_dark(report.call_chart())
    for theme, picture in zip(("light", "dark"), both, strict=True):
        files[ROOT / "docs" / "images" / f"whole-call-{theme}.svg"] = picture
    return files


def main() -> int:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is not up to date")
    args = parser.parse_args()
    try:
        files = fresh_files()
    except ValueError as e:
        print(e, file=sys.stderr)
        return 1
    stale = [p for p, text in files.items() if not p.exists() or p.read_text() != text]
    for path in stale:
        if args.check:
            print(f"{path} is not up to date: run python -m {PROGRAM}", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path])
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
