"""Tables of KV in shards: runs on two GPUs, and the model for more."""

from collections.abc import Callable, Iterable

from benchmarks.kernel.scaling import (
    Cluster,
    Layer,
    Link,
    attention_us,
    gather_bytes,
    replicas_us,
    ring_bytes,
    ring_us,
    tree_us,
)
from benchmarks.support import published
from benchmarks.support.published import Result, table, versions

#: tokens from which on the goals hold
LONG = 512 << 10
#: vLLM's FlashAttention-3 on a rank's own shard
FA3S = ("FlashAttention-3", "paged FlashAttention-3")


def h200s() -> Cluster:
    """A cluster of H200s, 8 to a node. Reading, and the fixed time: from kernel.json, what its
    `256_1024` takes in addition to its roof. Multiplying, and NVLink between two GPUs: from
    scale.json of 22 November 2026, in which 64 requests reach 550 TFLOP/s, a small
    all-reduce takes 14 us, and the ring sends 350 GB/s. InfiniBand: the data sheet of NDR with one
    port per GPU; its latency is assumed.
    """
    cell = anchor("256_1024")
    fixed = 1e3 * (cell["peers"]["ours"]["ms"] - cell["roof_ms"])
    return Cluster(4.35e6, 5.5e8, fixed, 8, Link(14.0, 3.5e5), Link(20.0, 5e4))


def anchor(workload: str) -> Result:
    """The cell of kernel.json with 32:8 heads."""
    cells = published.load("kernel")["cells"]
    return next(c for c in cells if c["workload"] == workload and c["heads"] == "32:8")


def ranged(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def model_checked() -> str:
    """Measured times compared with the model, where both exist."""
    cluster, result = h200s(), published.load("scale")
    alone = [("1,64_32768,64", Layer(64, 1 << 15, 64)), ("1,32_122880,256", Layer(32, 122880, 256))]
    times = (
        f"{layer.num_reqs} requests on {layer.shared >> 10}k tokens take "
        f"{1e3 * anchor(workload)['peers']['ours']['ms']:.0f} us, the model predicts "
        f"{attention_us(layer, cluster):.0f}"
        for workload, layer in alone
    )

    def over_model(way: str, model: Callable[..., float], min_tokens: int = 0) -> str:
        return ranged(
            row["us"][way] / model(Layer(row["requests"], row["tokens"]), cluster, result["ranks"])
            for row in result["rows"]
            if row["tokens"] >= min_tokens
        )

    return (
        f"Measured on one GPU: {'; '.join(times)}. On two, [in CUDA graphs](#two-gpus), "
        f"gather takes {over_model('gather', tree_us)} times what the model predicts, from "
        f"{LONG >> 10}k tokens on {over_model('gather', tree_us, LONG)}; ring attention "
        f"{over_model('ring', ring_us)}, and {over_model('ring', ring_us, LONG)}."
    )


def scale_table(_: Result) -> str:
    """One layer's attention by the model: replicas against tree reduction on 1 to 64 GPUs, and tree
    reduction against ring attention on 2 to 128.
    """
    gpus, cluster = (1, 2, 4, 8, 16, 64), h200s()
    many = (2, 8, 16, 64, 128)
    layers = [(tokens, Layer(64, tokens, 128)) for tokens in (1 << 10, 1 << 14, 1 << 17, 1 << 20)]
    longest = Layer(1, 5_120_000, 0, 16, 16, 128)
    trees, rings = ([way(longest, cluster, n) for n in many] for way in (tree_us, ring_us))

    def times(layer: Layer, n: int) -> str:
        return f"{replicas_us(layer, cluster, n):.0f} / {tree_us(layer, cluster, n):.0f}"

    def sent(layer: Layer, n: int) -> str:
        return f"{gather_bytes(layer, n) / 2**20:.1f} / {ring_bytes(layer, n) / 2**20:.0f} MiB"

    def columns(counts: Iterable[int]) -> str:
        return " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in counts)

    return "\n".join(
        [
            model_checked(),
            "",
            "One layer, 64 requests with 128 tokens of their own behind the shared prefix, 32:8 "
            "heads, head_dim 128, bfloat16; a token of an 8B model takes 32 such layers. "
            "Microseconds: replicas / tree reduction.",
            "",
            *table(
                f"shared prefix | KV | {columns(gpus)}",
                (
                    (
                        f"{tokens >> 10}k",
                        f"{layer.kv_bytes / 2**20:.0f} MiB",
                        *(times(layer, n) for n in gpus),
                    )
                    for tokens, layer in layers
                ),
            ),
            "",
            "Bytes that one GPU sends for it, tree reduction (one collective) / ring attention:",
            "",
            *table(
                f"shared prefix | {columns(gpus[1:])}",
                (
                    (f"{tokens >> 10}k", *(sent(layer, n) for n in gpus[1:]))
                    for tokens, layer in layers
                ),
            ),
            "",
            "One request on 5.12M tokens, one layer of 16:16 heads, as in figure 3 of the paper. "
            "Microseconds:",
            "",
            *table(
                f" | {columns(many)}",
                (
                    ("tree reduction", *(f"{us:.0f}" for us in trees)),
                    ("ring attention", *(f"{us:.0f}" for us in rings)),
                    (
                        "ring / tree",
                        *(f"{ring / tree:.0f}" for tree, ring in zip(trees, rings, strict=True)),
                    ),
                    (
                        "ring / tree in the paper, H100s",
                        *[""] * (len(many) - 1),
                        "close to 8",
                    ),
                ),
            ),
        ]
    )


def scale_how(result: Result, others: list[str], small: float) -> str:
    """How the times of ``scale_measured_table`` were measured."""
    rates = {}
    for name, digits in (("copy", 2), ("matrix product", 0), ("dense attention", 0)):
        found = [f"{row['rates'][name] / 1e6:.{digits}f}" for row in result["rows"]]
        rates[name] = " to ".join(dict.fromkeys((min(found, key=float), max(found, key=float))))
    about_fa3 = f"{others[0]}: one sequence with all queries on the own shard. " if others else ""
    if len(others) > 1:
        about_fa3 += f"Paged: by the blocks of {result['block_size']} tokens that ours reads. "
    return (
        f"{result['ranks']} x {result['device']}; {versions(result)}. `{result['command']}`: one "
        f"layer, {result['heads']} heads of 128, bfloat16; microseconds, median of "
        f"{result['repeats']} replays of a CUDA graph of eight calls, in turns, the slowest "
        "rank's. Bound: the time to read a rank's shard or to multiply with it, at the rates of a "
        f"large copy ({rates['copy']} TB/s) and a large matrix product "
        f"({rates['matrix product']} TFLOP/s) in the same row, and of one small all-reduce, the "
        "fastest of all rows "
        f"({small:.0f}). cuDNN's attention of 16384 queries takes turns with them, too: "
        f"{rates['dense attention']} TFLOP/s. Own shard / its bound: the kernel without any "
        f"reduction, over the bound without the all-reduce. {about_fa3}Launched: the best tree "
        "and the ring called from Python, to the end of their work. Model: what "
        "[the model](#model) predicts for gather. Memory: peak of a launched call in "
        "addition to shard and queries, MiB, gather / ring, and by the paper's equations 9 and 8."
    )


def scale_measured_table(result: Result) -> str:
    """Tree reduction and ring attention on real ranks: times, the bound, memory."""
    cluster = h200s()
    trees = [way for way in result["rows"][0]["errors"] if way != "ring"]
    small = min(row["us"]["small all-reduce"] for row in result["rows"])
    others = [way for way in FA3S if way in result["rows"][0]["us"]]
    rows = []
    for row in result["rows"]:
        us = row["us"]
        best, launched = (min(x[way] for way in trees) for x in (us, row["launched_us"]))
        bound = row["roof_us"] + small
        layer = Layer(row["requests"], row["tokens"])
        rows.append(
            (
                f"{row['tokens'] >> 10}k",
                row["requests"],
                *(f"{us[way]:.0f}" for way in (*trees, "ring", "own shard", *others)),
                f"{bound:.0f}",
                f"{us['ring'] / best:.1f}",
                f"{best / bound:.2f}",
                f"{us['own shard'] / row['roof_us']:.2f}",
                f"{best / us['own shard']:.2f}",
                f"{launched:.0f} / {row['launched_us']['ring']:.0f}",
                f"{tree_us(layer, cluster, result['ranks']):.0f}",
                *(
                    " / ".join(f"{row[key][way] / 2**20:.1f}" for way in ("gather", "ring"))
                    for key in ("peak_bytes", "peak_model")
                ),
            )
        )
    header = (
        f"tokens | requests | {' | '.join([*trees, 'ring', 'own shard', *others])} | bound "
        "| ring / best tree | best tree / bound | own shard / its bound | best tree / own shard "
        "| launched: tree / ring | model | memory | equations"
    )
    lines = [scale_how(result, others, small), "", *table(header, rows)]
    if long := [row for row in result["rows"] if row["tokens"] >= LONG]:
        lines += ["", long_contexts(long, trees, others, small)]
    return "\n".join(lines)


def long_contexts(rows: list[Result], trees: list[str], others: list[str], small: float) -> str:
    """The spread of what the rows of long contexts reach, by the number of requests."""

    def best(row: Result) -> float:
        return min(row["us"][way] for way in trees)

    by_requests = [
        (f"{n} request{'s' * (n > 1)}", [row for row in rows if row["requests"] == n])
        for n in sorted({row["requests"] for row in rows})
    ]
    over_bound = (
        f"{title} {ranged(best(row) / (row['roof_us'] + small) for row in of)}"
        for title, of in by_requests
    )
    title, most = by_requests[-1]
    alone = (
        f"{way} {ranged(row['us'][way] / row['roof_us'] for row in most)}"
        for way in ("own shard", *others)
    )
    return (
        f"From {LONG >> 10}k tokens on: ring / best tree "
        f"{ranged(row['us']['ring'] / best(row) for row in rows)}; best tree / bound: "
        f"{', '.join(over_bound)}; without any reduction, {title}: {', '.join(alone)} times the "
        "bound without the all-reduce."
    )


def scale_blocks_table(small_blocks: Result) -> str:
    """Long contexts on two ranks by KV block size, with FlashAttention-3 on the same blocks."""
    results = [small_blocks, published.load("scale_blocks_64")]
    measured = [(of["block_size"], row) for of in results for row in of["rows"]]
    small = min(row["us"]["small all-reduce"] for _, row in measured)
    ways = ("gather", "one_shot", "own shard", *reversed(FA3S))
    rows = []
    for size, row in measured:
        us, roof = row["us"], row["roof_us"]
        best = min(us["gather"], us["one_shot"])
        ratios = best / (roof + small), *(us[way] / roof for way in ways[2:])
        rows.append(
            (
                size,
                f"{row['tokens'] >> 10}k",
                row["requests"],
                *(f"{x:.0f}" for x in (*(us[way] for way in ways), roof + small)),
                *(f"{ratio:.2f}" for ratio in ratios),
            )
        )
    commands = " and ".join(f"`{of['command']}`" for of in results)
    how = (
        f"{results[0]['ranks']} x {results[0]['device']}; {versions(results[0])}. "
        f"{commands}: as above, the fastest small all-reduce of both runs {small:.0f} us."
    )
    header = (
        f"blocks | tokens | requests | {' | '.join(ways)} | bound | best tree / bound "
        "| own shard / its bound | paged FlashAttention-3 / that | FlashAttention-3 / that"
    )
    return "\n".join([how, "", *table(header, rows)])
