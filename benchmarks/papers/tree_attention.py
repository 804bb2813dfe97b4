"""Tree Attention: experiments of sections 6.1 to 6.3, by the model and on two ranks."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from benchmarks.kernel import scaling
from benchmarks.papers.experiment import (
    CPU,
    GPUS,
    Figures,
    Point,
    Results,
    Series,
    Setting,
    experiment,
    mega,
    span,
)
from benchmarks.support import program
from benchmarks.support.published import table

#: the paper's attention block: 16 heads of 128, each with KV of its own
HEADS = 16
#: largest difference of equal results in float64
TOLERANCE = 1e-12
#: tokens of the example in section 6.3, and of the longest context of figure 3
EXAMPLE, LONGEST = 640_000, 5_120_000
#: tokens on each of two GPUs for which equations 8 and 9 give figure 4's gap; the paper has none
SHARD = 64_000
#: after which ranks hang: a point takes one at most
MINUTES = 3
#: numbers of GPUs of figure 3 here; the paper has 8 to 128
RANKS = (2, 4)


def layer(tokens: int, heads: int = HEADS) -> scaling.Layer:
    return scaling.Layer(1, tokens, 0, heads, heads, 128)


#: DGX H100: data sheets; the fixed time of a launch is that of our H200s (``benchmarks.tables``),
#: latencies are assumed
CLUSTER = scaling.Cluster(3.35e6, 7e8, 14.0, 8, scaling.Link(10.0, 4.5e5), scaling.Link(20.0, 5e4))


def count_volume(setting: Setting) -> Iterator[Point]:
    for gpus in (2, 8, 64, 128):
        yield Point(f"{gpus} GPUs", partial(volume, gpus))


def volume(gpus: int) -> Figures:
    """Bytes that a GPU sends for the example of section 6.3, and the times of a shard."""
    whole = layer(EXAMPLE)
    shard = whole.kv_bytes / gpus
    link = CLUSTER.inside if gpus <= CLUSTER.gpus_per_node else CLUSTER.between
    return {
        "ring": scaling.ring_bytes(whole, gpus),
        "gather": scaling.gather_bytes(whole, gpus),
        "all_reduce": scaling.all_reduce_bytes(whole, gpus),
        "read_us": shard / CLUSTER.memory_bytes_per_us,
        "travel_us": link.latency_us + shard / link.bytes_per_us,
    }


def volume_sentence(results: Results) -> str:
    # the paper's example, or what a run that was stopped has
    name = "8 GPUs" if "8 GPUs" in results else next(iter(results))
    example = results[name]
    ratio = example["ring"] / example["all_reduce"]
    return (
        f"a GPU sends {ratio:,.0f} times as many bytes in ring attention as in algorithm 3; of "
        f"{name}, a shard is read in {example['read_us']:.0f} us at the memory's speed and sent in "
        f"{example['travel_us']:.0f}"
    )


def volume_table(results: Results) -> list[str]:
    lines = [
        (
            name,
            mega(f["ring"]),
            *(f"{f[way] / 1024:.0f}" for way in ("gather", "all_reduce")),
            *(f"{f[us]:.0f}" for us in ("read_us", "travel_us")),
        )
        for name, f in results.items()
    ]
    return [
        f"One request on {EXAMPLE} tokens, one layer of {HEADS} heads of 128, bfloat16, by the "
        "equations and data sheets of a DGX H100.",
        "",
        *table(
            "GPUs | ring attention sends, MiB | one all-gather, KiB | algorithm 3, KiB "
            "| reading a shard, us | sending it, us",
            lines,
        ),
    ]


def volume_series(results: Results) -> Series:
    titles = {"ring": "ring attention", "gather": "one all-gather", "all_reduce": "algorithm 3"}
    values = {n: {titles[way]: f[way] / 1024 for way in titles} for n, f in results.items()}
    return Series("KiB that a GPU sends", values)


def count_peaks(setting: Setting) -> Iterator[Point]:
    for hidden in (2048, 4096):
        yield Point(f"hidden size {hidden}", partial(peaks, layer(2 * SHARD, hidden // 128)))


def peaks(whole: scaling.Layer) -> Figures:
    return {"ring": scaling.ring_peak_bytes(whole, 2), "tree": scaling.tree_peak_bytes(whole, 2)}


def peaks_sentence(results: Results) -> str:
    gaps = (f"{n}: {(f['ring'] - f['tree']) / 1e6:.0f} MB" for n, f in results.items())
    return f"the gap by equations 8 and 9: {', '.join(gaps)}"


def peaks_series(results: Results) -> Series:
    values = {n: {way: f[way] / 1e6 for way in ("tree", "ring")} for n, f in results.items()}
    return Series("MB at the peak", values)


def model_latency(setting: Setting) -> Iterator[Point]:
    for gpus in (8, 64, 128):
        yield Point(f"{gpus} GPUs", partial(latency, gpus))


def latency(gpus: int) -> Figures:
    arguments = layer(LONGEST), CLUSTER, gpus
    return {"ring_us": scaling.ring_us(*arguments), "tree_us": scaling.tree_us(*arguments)}


def model_sentence(results: Results) -> str:
    times = (f"{n} {f['ring_us'] / f['tree_us']:.0f}" for n, f in results.items())
    return f"time of ring attention over tree reduction, by the model: {', '.join(times)}"


def model_series(results: Results) -> Series:
    values = {n: {"tree": f["tree_us"], "ring": f["ring_us"]} for n, f in results.items()}
    return Series("microseconds by the model", values)


def time_ranks(setting: Setting) -> Iterator[Point]:
    """One request on two ranks, and on four where there are as many GPUs."""
    counts = (256,) if setting.tiny else (81_920, 163_840, 327_680, 655_360, 1_310_720)
    for ranks in RANKS:
        if ranks > RANKS[0] and (setting.tiny or num_gpus(setting) < ranks):
            continue
        for tokens in counts:
            run = partial(run_ranks, setting, tokens, ranks)
            yield Point(f"{tokens} tokens" + (f", {ranks} GPUs" if ranks > RANKS[0] else ""), run)


def num_gpus(setting: Setting) -> int:
    if setting.device != "cuda":
        return 0
    import torch

    return torch.cuda.device_count()


def measure_peaks(setting: Setting) -> Iterator[Point]:
    """The two hidden sizes of figure 4, with the tokens of ``count_peaks``."""
    for hidden in (2048, 4096):
        tokens = 256 if setting.tiny else 2 * SHARD
        run = partial(run_ranks, setting, tokens, RANKS[0], hidden // 128)
        yield Point(f"hidden size {hidden}", run)


def measured_sentence(results: Results) -> str:
    gaps = (
        f"{n}: {(f['peak_bytes']['ring'] - f['peak_bytes']['gather']) / 1e6:.0f} MB"
        for n, f in results.items()
        if f["peak_bytes"]
    )
    return f"the gap by the allocator's peaks: {', '.join(gaps) or 'a CPU has none'}"


def run_ranks(setting: Setting, tokens: int, ranks: int = 2, heads: int = HEADS) -> Figures:
    """``benchmarks.kernel.scale`` on some ranks, in processes of their own."""
    arguments = [
        *("--device", setting.device, "--ranks", str(ranks), "--tokens", str(tokens)),
        *("--requests", "1", "--heads", f"{heads}:{heads}", "--repeats", str(setting.repeats)),
    ]
    result, reason = program.measured("benchmarks.kernel.scale", arguments, MINUTES)
    if result is None:
        return {"failed": reason}
    (row,) = result["rows"]
    return {"ranks": ranks, **row}


def ranks_sentence(results: Results) -> str:
    over: dict[int, list[float]] = {}
    for f in results.values():
        fastest = min(f["us"][way] for way in TREES if way in f["us"])
        over.setdefault(f.get("ranks", RANKS[0]), []).append(f["us"]["ring"] / fastest)
    found = (f"on {ranks} ranks: {span(ratios)}" for ranks, ratios in over.items())
    return f"time of ring attention over tree reduction {'; '.join(found)}"


#: reductions, and how tables call them; the last one runs on GPUs only
TREES = {
    "gather": "one all-gather",
    "all_reduce": "algorithm 3",
    "energy": "algorithms 1 and 2",
    "one_shot": "one launch",
}


def ways_of(results: Results) -> dict[str, str]:
    """The ways that were timed, and how tables call them."""
    timed = next(iter(results.values()))["us"]
    return {way: title for way, title in (*TREES.items(), ("ring", "ring")) if way in timed}


def ranks_table(results: Results) -> list[str]:
    lines, ways = [], ways_of(results)
    for name, f in results.items():
        peak = f["peak_bytes"]
        entries = [f"{f['us'][way]:.1f}" for way in ways]
        held = [mega(peak[way]) if peak else "-" for way in ("gather", "ring")]
        sent = [mega(f["bytes_sent"][way]) for way in ("gather", "ring")]
        lines.append((name, *entries, *held, *sent))
    return [
        "Microseconds; MiB at the peak in addition to the shard, and sent.",
        "",
        *table(
            f"context | {' | '.join(ways.values())} | peak, tree | peak, ring | sent, tree "
            "| sent, ring",
            lines,
        ),
    ]


def ranks_series(results: Results) -> Series:
    ways = ways_of(results)
    values = {
        name: {title: f["us"][way] for way, title in ways.items()} for name, f in results.items()
    }
    return Series("microseconds on two ranks", values)


def check_energy(setting: Setting) -> Iterator[Point]:
    """The energy's gradient against attention, in float64; equal on every machine, or not."""
    for num_shards, causal in ((1, False), (2, False), (8, False), (8, True)):
        name = f"{num_shards} shards, {'causal' if causal else 'one query'}"

        def run(num_shards=num_shards, causal=causal) -> Figures:
            import torch

            from benchmarks.papers import energy

            torch.manual_seed(0)
            tokens, seq_lens = 64, torch.arange(1, 65) if causal else None
            q, k, v = torch.randn(3, tokens, HEADS, 128, dtype=torch.float64)
            q = q if causal else q[:1]
            edges = [tokens * i // num_shards for i in range(num_shards + 1)]
            shards = [energy.KVShard(k[a:b], v[a:b], a) for a, b in pairwise(edges)]
            options = {"sm_scale": 128**-0.5, "seq_lens": seq_lens}
            attention = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in (q, k, v)), is_causal=causal
            ).transpose(0, 1)
            gradient = energy.attention_by_gradient(q, shards, **options)
            sharded = energy.attention_by_shards(q, shards, **options)
            return {
                "tokens": tokens,
                "tolerance": TOLERANCE,
                "gradient": bool((gradient - attention).abs().max() < TOLERANCE),
                "algorithm_2": bool((sharded - gradient).abs().max() < TOLERANCE),
            }

        yield Point(name, run)


def energy_sentence(results: Results) -> str:
    gradient, sharded = (sum(f[of] for f in results.values()) for of in ("gradient", "algorithm_2"))
    return (
        f"the energy's gradient is attention to {TOLERANCE:g} in float64 in {gradient} of "
        f"{len(results)} cases, and algorithm 2 is that gradient in {sharded}"
    )


EXPERIMENTS = (
    experiment("tree-attention-energy", CPU, check_energy, energy_sentence),
    experiment(
        "tree-attention-volume", CPU, count_volume, volume_sentence, volume_table, volume_series
    ),
    experiment("tree-attention-figure-4", CPU, count_peaks, peaks_sentence, series=peaks_series),
    experiment(
        "tree-attention-figure-4-measured",
        GPUS,
        measure_peaks,
        measured_sentence,
        ranks_table,
        seconds=60 * MINUTES,
    ),
    experiment("tree-attention-model", CPU, model_latency, model_sentence, series=model_series),
    experiment(
        "tree-attention-figure-3",
        GPUS,
        time_ranks,
        ranks_sentence,
        ranks_table,
        ranks_series,
        seconds=60 * MINUTES,
    ),
)
