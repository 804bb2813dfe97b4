"""What ``estimate`` prints for people: the answer first, then tables."""

from typing import Any

from vllm_prefixshare.cli.output import print_table

#: Ratio below which nothing is gained.
MIN_GAIN = 1.02
#: Characters of a text that are shown.
SHOWN = 32


def print_report(found: dict[str, Any]) -> None:
    """Print what ``estimate --json`` has."""
    print(_verdict(found))
    if (advice := _advice(found)) is not None:
        print(advice)
    if found["memory"]["too_long"] and not found["batches"]:
        _print_prefixes(found)
        return
    print(_workload(found))
    if "seconds" in found:
        print("of the whole file, if each batch starts with an empty prefix cache:")
    print_table(_estimates(found))
    _print_notes(found)
    _print_prefixes(found)
    _print_call(found)


def _verdict(found: dict[str, Any]) -> str:
    memory = found["memory"]
    if not memory["fits"]:
        return (
            f"Does not fit: {memory['too_long']} of {_count(found)} need more KV cache than the "
            f"{memory['kv_gb']:.1f} GB that one {found['gpu']} has next to "
            f"{memory['weights_gb']:.1f} GB of weights: name a larger GPU, or "
            "--tensor-parallel-size."
        )
    if "seconds" not in found:
        gain = _gain(found["attention_gain"], found)
        return (
            f"Attention of {_layers(found)}: {gain}, {found['attention_us_unshared']:.1f} us with "
            f"vLLM, {found['attention_us_shared']:.1f} us with PREFIX_SHARE."
        )
    seconds, per_token = found["seconds"], found["ms_per_token"]
    return (
        f"The whole call: {_gain(seconds['vllm'] / seconds['parts_on'], found)}, "
        f"{_number(seconds['vllm'])} s with vLLM, {_number(seconds['parts_on'])} s with "
        f"PREFIX_SHARE; decode {_number(per_token['vllm'])} and "
        f"{_number(per_token['parts_on'])} ms a token (batch {found['batch']})."
    )


def _advice(found: dict[str, Any]) -> str | None:
    """What another order would gain, if it is much."""
    for row in found["estimates"]:
        if (row["batch"], row["order"]) != (found["batch"], "sorted by prefix"):
            continue
        if "seconds" in row and found["seconds"]["parts_on"] > 1.1 * row["seconds"]["parts_on"]:
            return (
                f"Sorted by prefix, PREFIX_SHARE takes {_number(row['seconds']['parts_on'])} s: "
                "sort the file, or set VLLM_PREFIXSHARE_ORDER=prefix."
            )
    return None


def _gain(gain: float, found: dict[str, Any]) -> str:
    gpus = _gpus(found)
    return f"no gain on {gpus}" if gain < MIN_GAIN else f"{gain:.2f} times as fast on {gpus}"


def _gpus(found: dict[str, Any]) -> str:
    count = found["num_gpus"]
    return str(found["gpu"]) if count == 1 else f"{count} {found['gpu']}"


def _count(found: dict[str, Any]) -> str:
    count = found["requests"]
    return f"{count} request{'s' if count != 1 else ''}"


def _layers(found: dict[str, Any]) -> str:
    return "one layer" if found["layers"] == 1 else f"{found['layers']} layers"


def _workload(found: dict[str, Any]) -> str:
    model = f"{found['model']}, " if found["model"] else ""
    return (
        f"{model}{_count(found)}, {found['output_tokens']} output tokens each; text counts as "
        f"tokens {found['tokens']}"
    )


def _estimates(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of batch sizes and orders; pairs are vLLM's value and the value with the parts."""
    whole = "seconds" in found
    header = ["batch", "order", "share factor"]
    header += ["ms a token", "tokens/s", "GPU-hours"] if whole else ["attention, us"]
    rows = [tuple(header)]
    for row in found["estimates"]:
        if not row["batches"]:
            continue
        cells = [str(row["batch"]), row["order"], f"{row['share_factor']:.2f}"]
        if whole:
            names = ["ms_per_token", "tokens_per_second", "gpu_hours"]
            cells += [_pair(row[name]["vllm"], row[name]["parts_on"]) for name in names]
        else:
            cells.append(_pair(row["attention_us_unshared"], row["attention_us_shared"]))
        rows.append(tuple(cells))
    return rows


def _pair(before: float, after: float) -> str:
    return f"{_number(before)} -> {_number(after)}"


def _number(value: float) -> str:
    """Three or more digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _print_notes(found: dict[str, Any]) -> None:
    memory = found["memory"]
    print(
        f"KV tokens of a decode step, batch {found['batch']}: {found['kv_tokens']} one by one, "
        f"{found['kv_tokens_read']} as planned"
    )
    print(
        f"attention of {_layers(found)} on {found['gpu']}: {found['attention_us_unshared']:.1f} us "
        f"unshared, {found['attention_us_shared']:.1f} us shared, {found['attention_gain']:.2f} "
        f"times as fast, from the {found['cost']}"
    )
    for reason, count in found["layers_left_out"].items():
        print(f"not counted: {count} with {reason}")
    if found["special_weights"] and "decode" in found["call_ms"]:
        what = " and ".join(found["special_weights"])
        print(f"not counted: {what}; arithmetic is that of dense weights of 16 bits")
    print(
        f"memory of one {found['gpu']}: {memory['weights_gb']:.1f} GB of weights and up to "
        f"{found['kv_gb']:.1f} GB of KV cache, of {memory['usable_gb']:.1f} GB"
    )
    if found["limited_by_memory"]:
        print(f"the KV cache holds fewer than {found['batch']} requests at a time")


def _print_prefixes(found: dict[str, Any]) -> None:
    cache = found["prefix_cache"]
    print(
        f"prefix cache: {cache['reusable']:.1%} of {cache['prompt_tokens']} prompt tokens are in "
        f"full blocks of {cache['block_size']} that an earlier request has"
    )
    if not cache["breaks"]:
        return
    print("what breaks prefixes, by the tokens after it that are equal and not shared:")
    rows = [("block", "token", "requests", "equal after", "first", "has", "instead of", "in")]
    rows += [
        (
            str(one["block"]),
            str(one["token"]),
            str(one["requests"]),
            str(one["equal_after"]),
            _shown(one["first"]),
            _shown(one["text"]),
            _shown(one["other_text"]),
            _shown(one["differs_from"]),
        )
        for one in cache["breaks"]
    ]
    print_table(rows)


def _shown(text: str) -> str:
    """The start of a text from a file, without codes for the terminal."""
    return ascii(text)[1:-1][:SHOWN]


def _print_call(found: dict[str, Any]) -> None:
    print(f"where the time goes, ms of a batch of {found['batch']}, one thing after the other:")
    rows = [("", "vLLM", "parts off", "parts on")]
    rows += [
        (row, *(f"{ms:.1f}" for ms in times.values())) for row, times in found["call_ms"].items()
    ]
    print_table(rows)
    print(f"from {found['host_cost']}")
    if "prefill" not in found["call_ms"]:
        print(
            "prefill and decode need the weights: name a --model that has them, or --weights-gb"
            " and --num-layers"
        )
