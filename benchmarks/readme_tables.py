"""Write the README's tables from the benchmarks' JSON; ``--check`` only compares.

python benchmarks/readme_tables.py
"""

import argparse
import json
import re
import sys
from pathlib import Path

from kernel_report import OURS, best_peer

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PUBLISHED = ROOT / "benchmarks" / "published"


def cpu_table() -> str:
    result = json.loads((PUBLISHED / "cpu.json").read_text())
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    lines = [
        f"{result['model']}; {result['processor']} cores; {versions}. `{result['command']}`: "
        f"median and range of {result['repeats']} runs of each engine, taking turns.",
        "",
        "| shared document | private prompt | batch | stock, ms a token | PREFIX_SHARE | speed-up "
        "| KV read, share factor | plans / steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ours, stock = row["spread"]["PREFIX_SHARE"], row["spread"]["stock"]
        lines.append(
            f"| {row['document']} | {row['private']} | {row['batch']} "
            f"| {row['stock_ms']:.1f} ({stock[0]:.1f}-{stock[1]:.1f}) "
            f"| {row['prefix_share_ms']:.1f} ({ours[0]:.1f}-{ours[1]:.1f}) "
            f"| {row['speedup']:.2f} | {row['share_factor']:.1f} "
            f"| {row['plans']} / {row['decode_steps']} |"
        )
    return "\n".join(lines)


def kernel_table() -> str:
    result = json.loads((PUBLISHED / "kernel.json").read_text())
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    titles = result["titles"]
    lines = [
        f"{result['gpu']}; {versions}. `{result['command']}`: milliseconds of one layer, median of "
        f"{result['repeats']} CUDA-graph replays with the L2 cache flushed (* without a graph), "
        f"{result['dtype']}, head_dim {result['head_dim']}, blocks of {result['block_size']} "
        "tokens; in brackets the fraction of the roofline "
        f"({result['roofline']['TB/s']:.2f} TB/s, {result['roofline']['TFLOP/s']:.0f} TFLOP/s).",
        "",
        f"| workload | heads | batch | roof | {' | '.join(titles.values())} | best peer / ours |",
        "|" + "---|" * (len(titles) + 5),
    ]
    for cell in result["cells"]:
        entries = [kernel_entry(cell["peers"][name]) for name in titles]
        best = best_peer(cell)
        ours = cell["peers"][OURS[0]]
        gain = f"{best[1] / ours['ms']:.2f}" if best and ours["status"] == "ok" else "-"
        lines.append(
            f"| {cell['workload']} | {cell['heads']} | {cell['batch']} | {cell['roof_ms']:.4f} "
            f"| {' | '.join(entries)} | {gain} |"
        )
    return "\n".join(lines)


def kernel_entry(found: dict[str, object]) -> str:
    if found["status"] != "ok":
        return "-" if found["status"] == "unavailable" else str(found["status"])
    return f"{found['ms']:.4f}{'' if found['graph'] else '*'} ({found['roofline']:.0%})"


TABLES = {"cpu": cpu_table, "kernel": kernel_table}


def published() -> list[str]:
    """The tables whose results are there."""
    return [name for name in TABLES if (PUBLISHED / f"{name}.json").exists()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if the README is not up to date"
    )
    args = parser.parse_args()
    text = README.read_text()
    new = text
    for name in published():
        block = f"<!-- table {name} -->\n{TABLES[name]()}\n<!-- end -->"
        new, found = re.subn(
            rf"<!-- table {name} -->.*?<!-- end -->", lambda _, b=block: b, new, flags=re.DOTALL
        )
        if not found:
            print(f"README.md has no place for the table {name}", file=sys.stderr)
            return 1
    if args.check:
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
