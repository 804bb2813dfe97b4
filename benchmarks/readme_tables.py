"""Write the README's tables from the benchmarks' JSON; ``--check`` only compares.

python benchmarks/readme_tables.py
"""

import argparse
import json
import re
import sys
from pathlib import Path

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


TABLES = {"cpu": cpu_table}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if the README is not up to date"
    )
    args = parser.parse_args()
    text = README.read_text()
    new = text
    for name, table in TABLES.items():
        block = f"<!-- table {name} -->\n{table()}\n<!-- end -->"
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
