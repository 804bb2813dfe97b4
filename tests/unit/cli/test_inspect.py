"""``inspect``: block-table files, the schedule, and the contents of the pictures."""

import json
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.support.trees import tree
from tests.support.cli_runs import run
from vllm_prefixshare.cli import batches, picture
from vllm_prefixshare.cli.batches import tree_batch
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.cli.planned import Layer
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.catalog import SHARED_MEMORY, Gpu, q_tile
from vllm_prefixshare.planning.costs.gpus import GPUS
from vllm_prefixshare.planning.costs.roofline import AnalyticCost, analytic_cost
from vllm_prefixshare.planning.costs.table import CostTable

SVG = "{http://www.w3.org/2000/svg}"
TABLES = {
    "block_size": 16,
    "block_tables": [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]],
    "kv_lens": [60, 52, 40],
}


def write(path: Path, data: object) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    capsys.readouterr()
    assert main(["inspect", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_block_tables_are_read_as_the_requests_share_them(tmp_path, capsys):
    found = report(capsys, write(tmp_path / "t.json", TABLES), "--divider", "deft_node")
    assert (found["requests"], found["kv_tokens"], found["block_size"]) == (3, 152, 16)
    assert found["nodes"] == [
        {"parent": -1, "tokens": [0, 32], "requests": [2, 0, 1]},
        {"parent": 0, "tokens": [32, 48], "requests": [0, 1]},
    ]
    (row,) = found["dividers"]
    assert row["kv_tokens_read"] == 48 + 12 + 4 + 8
    reads: dict[int, int] = {}
    for tiles in found["workers"]:
        for piece in [p for tile in tiles for p in tile["reads"]]:
            reads[piece["node"]] = reads.get(piece["node"], 0) + piece["tokens"]
    assert reads == {0: 32, 1: 16, -1: 24}


def test_a_file_may_hold_many_batches(tmp_path, capsys):
    one = {"block_size": 8, "block_tables": [[1]], "kv_lens": [3]}
    path = write(tmp_path / "t.jsonl", f"{json.dumps(TABLES)}\n{json.dumps(one)}\n")
    found = report(capsys, path)
    assert (found["requests"], found["batch"]) == (3, "t.jsonl, step 0 of 2"), "the largest"
    assert report(capsys, path, "--step", 1)["requests"] == 1
    assert report(capsys, path, "--step", -1)["batch"] == "t.jsonl, step 1 of 2"
    blank = write(tmp_path / "blank.jsonl", f"{json.dumps(TABLES)}\n\n{json.dumps(one)}\n\n")
    assert report(capsys, blank, "--step", -2)["requests"] == 3
    single = write(tmp_path / "t.json", json.dumps(TABLES, indent=1))
    assert report(capsys, single, "--step", 0)["requests"] == 3
    for file, step, steps in (
        (path, 2, "-2 to 1"),
        (single, 5, "-1 to 0"),
        (single, -9, "-1 to 0"),
    ):
        assert main(["inspect", str(file), "--step", str(step)]) == 2
        sentence = f"error: --step must be from {steps} for {file}, got {step}.\n"
        assert capsys.readouterr().err.endswith(sentence)


def test_a_file_and_a_tree_are_one_too_many(tmp_path, capsys):
    path = write(tmp_path / "t.json", TABLES)
    assert main(["inspect", str(path), "--tree", "1,4_64,32"]) == 2
    assert f"{path} and --tree are two batches: leave out one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("with_file", "words", "sentence"),
    [
        (False, ["--step", "0"], "--step is a line of a FILE: name one, or leave it out."),
        (True, ["--block-size", "32"], "says its block size: leave out --block-size."),
    ],
)
def test_an_option_that_would_be_dropped_is_refused(tmp_path, capsys, with_file, words, sentence):
    files = [str(write(tmp_path / "t.json", TABLES))] if with_file else []
    assert main(["inspect", *files, *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("", "is empty: name a file with block tables, or trace a server"),
        ("\n", "is empty: name"),
        ("{", "Expecting"),
        ("[]", "list indices must be integers"),
        ({}, "it has no 'kv_lens'"),
        ({**TABLES, "kv_lens": [60, 52]}, "lists, one entry for each request"),
        ({**TABLES, "kv_lens": [60, 52, "many"]}, "many"),
        ({**TABLES, "kv_lens": [60, 52, 0]}, "kv_lens[2] is 0"),
        ({**TABLES, "kv_lens": [65, 52, 40]}, "block_tables[0] has 4 blocks of 16 tokens, and"),
        ({**TABLES, "block_tables": [[1, 2, 3, 4], 7, [1, 2, 3]]}, "has no len()"),
        ({"block_size": 1, "block_tables": [], "kv_lens": []}, "one entry for each request"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path, data, sentence, capsys):
    assert main(["inspect", str(write(tmp_path / "t.json", data))]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "t.json" in error
    assert error.count("\n") == 1


def test_a_file_that_is_no_text_is_one_sentence(tmp_path, capsys):
    path = tmp_path / "t.json"
    path.write_bytes(b"\xff\xfe")
    assert main(["inspect", str(path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("tree", "write nodes per level, '_', tokens per node, such as 1,4,16_1024,256,64"),
        ("1,4_64,", "write nodes per level"),
        ("1,4", "write nodes per level"),
        ("1,-4_64,32", "write nodes per level"),
        ("1_1_000_000_000_000", "write nodes per level"),  # a number to Python, and a large one
        ("1,4,8_64,32", "name as many levels before '_' as after it"),
        ("1,4_0,0", "each level needs at least 1 node, and each node 1 token"),
        ("0,4_64,32", "each level needs at least 1 node, and each node 1 token"),
        ("4,1_256,64", "no level can have fewer nodes than the one above it"),
    ],
)
def test_a_wrong_tree_is_told_which_rule_it_breaks(spec, rule):
    with pytest.raises(PrefixShareError) as error:
        tree_batch(spec, 16)
    assert str(error.value).startswith(f"tree '{spec}' is not valid: {rule}")


@pytest.mark.parametrize("block_size", [1, 16, 100])
@pytest.mark.parametrize(
    "spec", ["1_7", "5_40", "1,4_64,32", "1,4,16_1024,256,64", "1,2,7_33,15,20", "2,2,5_5,9,30"]
)
def test_a_tree_shares_the_blocks_that_a_forest_of_its_nodes_shares(spec, block_size):
    batch, work = tree_batch(spec, block_size), tree(spec, block_size)
    np.testing.assert_array_equal(batch.seq_lens, work.seq_lens)
    table, expected = batch.block_table, work.block_table
    assert table.dtype == np.int32 and table.shape == expected.shape
    assert table.flags.c_contiguous, "kernels read rows"
    assert set(np.unique(table)) == {*range(1, int(table.max()) + 1)}
    pairs = set(zip(table.ravel().tolist(), expected.ravel().tolist(), strict=True))
    assert len(pairs) == table.max() == len(np.unique(expected))


@pytest.mark.parametrize(
    "spec",
    ["1,99999999_16,16", "1,16384_999999999999999999999,16", "1,1_16,99999999999", "1_268435457"],
)
def test_a_tree_that_is_too_large_is_not_made(spec):
    with pytest.raises(PrefixShareError, match="describe a smaller one"):
        tree_batch(spec, 65536)


def test_the_longest_requests_are_planned(tmp_path, capsys):
    """Planning counts in 32 bits, and rounds up to whole blocks and tiles."""
    size = 65536
    row = [*range(1, batches.MAX_TOKENS // size + 1)]
    tables = {
        "block_size": size,
        "block_tables": [row, [*row[:-1], 5000], row],
        "kv_lens": [batches.MAX_TOKENS] * 3,
    }
    found = report(capsys, write(tmp_path / "t.json", tables), "--compare")
    read = {row["divider"]: row["kv_tokens_read"] for row in found["dividers"]}
    assert read["per_request"] == 3 * batches.MAX_TOKENS
    assert read["depth_first"] == read["deft_node"] == batches.MAX_TOKENS + 2 * size


def rows_of(printed: str) -> list[list[str]]:
    """The lines below the header of the table, in words."""
    lines = printed.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("divider ")) + 1
    return [line.split() for line in lines[first:-1]]


def test_the_plan_comes_first_and_attention_without_sharing_next(capsys):
    arguments = ["--tree", "1,16_8192,64", "--gpu", "H200"]
    assert main(["inspect", *arguments]) == 0
    printed = capsys.readouterr().out
    plan, unshared = rows_of(printed)
    assert plan[:4] == ["depth_first", "(default)", "9216", "14.33"]
    assert unshared[:3] == ["unshared", "132096", "1.00"]
    gain = float(unshared[3]) / float(plan[4])
    verdict = re.fullmatch(
        r"reads 14\.33 times fewer KV tokens, estimated ([\d.]+) times less attention time; "
        r"planned by depth_first \(default\)",
        printed.splitlines()[-1],
    )
    assert verdict and float(verdict[1]) == pytest.approx(gain, rel=0.01)
    found = report(capsys, *arguments)
    assert found["attention_gain"] == pytest.approx(gain, rel=0.01)
    assert [(row["divider"], row["default"], row["as_run"]) for row in found["dividers"]] == [
        ("depth_first", True, False)
    ]


@pytest.mark.parametrize("tree", ["1,3_4096,64", "1,16_8192,64", "1,2_64,8", "4_400"])
def test_inspect_and_estimate_give_one_time(tmp_path, capsys, tree):
    batch = tree_batch(tree, 16)
    # of each request all tokens but the one to be computed, equal where blocks are
    rows = (16 * batch.block_table[:, :, None] + np.arange(16)).reshape(len(batch.seq_lens), -1)
    prompts = [row[: n - 1].tolist() for row, n in zip(rows, batch.seq_lens, strict=True)]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    inspected = report(capsys, "--tree", tree, "--gpu", "H200")
    words = ["--gpu", "H200", "--num-layers", "1", "--output-tokens", "0"]
    assert main(["estimate", "--json", str(path), *words]) == 0
    estimated = json.loads(capsys.readouterr().out)
    shared = inspected["dividers"][0]["attention_us"]
    assert inspected["attention_us_unshared"] == estimated["attention_us_unshared"]
    assert shared == estimated["attention_us_shared"]
    if inspected["dividers"][0]["share_factor"] == 1:  # so L2 serves both kernels
        assert inspected["attention_gain"] == estimated["attention_gain"] == 1


def test_a_plan_without_sharing_says_why(capsys):
    assert main(["inspect", "--tree", "4_400"]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict == "nothing is shared (no common prefix); planned by depth_first (default)"


def test_a_loss_is_called_a_loss(capsys):
    assert main(["inspect", "--tree", "1,2_64,1024", "--divider", "fixed", "--workers", "1"]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"estimated 1\.\d\d times the attention time; planned by fixed$", verdict)


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Draws an SVG, and returns the figure."""
    figures = []

    def encoded(figure):
        figures.append(figure)
        return picture_bytes(figure)

    picture_bytes = picture.encoded
    monkeypatch.setattr(picture, "encoded", encoded)

    def run_command(*arguments: object) -> Figure:
        assert main(["inspect", "--svg", str(tmp_path / "p.svg"), *map(str, arguments)]) == 0
        return figures[0]

    return run_command


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible()]


def boxes(figure: Figure) -> dict[str, tuple[float, float]]:
    """Map what each rectangle shows to its width and height in pixels."""
    patches = [patch for axes in figure.axes for patch in axes.patches]
    extents = {patch.get_label(): patch.get_window_extent() for patch in patches}
    return {label: (extent.width, extent.height) for label, extent in extents.items()}


def test_the_command_draws(tmp_path):
    done = run("inspect", "--divider", "fixed", "--svg", tmp_path / "p.svg")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tree 1,4,16_1024,256,64, priced by the cost table measured on")
    assert "\n16 requests, 21504 KV tokens read one by one\n  node 0: 1024 tokens" in done.stdout
    assert done.stdout.endswith(f"\nwrote {tmp_path / 'p.svg'}\n")
    svg = ElementTree.parse(tmp_path / "p.svg").getroot()
    assert svg.tag == f"{SVG}svg"
    found = [text.text for text in svg.iter(f"{SVG}text")]
    assert "Prefix forest of tree 1,4,16_1024,256,64" in found


def test_a_file_is_drawn_under_its_name_whatever_it_is(tmp_path, draw):
    name = os.fsdecode(b"$a_b$ \xff<&.json")
    figure = draw(write(tmp_path / name, TABLES))
    assert "Prefix forest of $a_b$ ?<&.json" in texts(figure)
    found = [text.text for text in ElementTree.parse(tmp_path / "p.svg").iter(f"{SVG}text")]
    assert "Prefix forest of $a_b$ ?<&.json" in found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["a\x01b\x1b.json", "\u6587\u66f8.json"])
def test_a_name_that_is_not_plain_text_is_drawn_without_a_warning(tmp_path, capsys, name):
    path = write(tmp_path / name, TABLES)
    svg = tmp_path / "p.svg"
    assert main(["inspect", str(path), "--svg", str(svg)]) == 0
    found = [text.text for text in ElementTree.parse(svg).iter(f"{SVG}text")]
    assert f"Prefix forest of {name.translate({1: '?', 27: '?'})}" in found


def test_equal_pictures_are_equal_files(tmp_path):
    for name in ("a.svg", "b.svg"):
        assert main(["inspect", "--divider", "fixed", "--svg", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()


def test_the_picture_is_to_scale(draw):
    figure = draw("--tree", "1,4_1024,512", "--divider", "flashforge")
    sizes = boxes(figure)
    node = sizes["node 0: 1,024 tokens x 4 requests"]
    private = [sizes[f"request {i}: 512 private tokens"] for i in range(4)]
    for width, height in private:
        assert width * 2 == pytest.approx(node[0], abs=0.2), "length by tokens"
        assert height * 4 == pytest.approx(node[1], abs=0.2), "height by requests"
    found = texts(figure)
    assert "Prefix forest of tree 1,4_1024,512" in found
    assert any(t.startswith("4 requests, 6,144 KV tokens one by one, 3,072 as") for t in found)
    assert "request 3: 512 private tokens" in found


def test_the_schedule_has_every_worker_and_what_it_reads(draw, capsys):
    arguments = ["--tree", "1,4,16_1024,256,64", "--gpu", "H200"]
    shown = texts(draw(*arguments))
    found = report(capsys, *arguments, "--divider", "depth_first")
    assert any("cost table measured on NVIDIA H200; 16 workers" in t for t in shown)
    workers = [t for t in shown if re.fullmatch(r"worker \d+", t)]
    busy = [tiles for tiles in found["workers"] if tiles]
    assert len(workers) == len(busy)
    loads = [t for t in shown if re.fullmatch(r"[\d.,]+ us, [\d,]+ tokens", t)]
    tokens = [sum(p["tokens"] for tile in tiles for p in tile["reads"]) for tiles in busy]
    assert [int(t.split()[2].replace(",", "")) for t in loads] == tokens
    assert sum(tokens) == found["dividers"][0]["kv_tokens_read"]


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("1_40", ["--divider", "flashforge"]),
        ("8_400", ["--divider", "per_request"]),
        ("1,256_4096,128", ["--divider", "depth_first"]),
        (
            "1,2,4,8,16,32,64,128,256_512,256,128,128,64,64,64,64,64",
            ["--gpu", "H200", "--divider", "depth_first"],
        ),
        ("1,2048_64,32", ["--divider", "deft_node"]),
    ],
)
def test_no_text_overlaps_another_or_leaves_the_page(draw, spec, options):
    figure = draw("--tree", spec, *options)
    page = figure.bbox
    assert 200 < page.height < 1400
    figure.draw_without_rendering()  # places texts in pixels of the page, not of the file
    taken = np.zeros((round(page.height), round(page.width)), bool)
    for text in figure.findobj(Text):
        if not text.get_text() or not text.get_visible():
            continue
        extent = text.get_window_extent()
        assert 0 <= extent.x0 <= extent.x1 <= page.width, text.get_text()
        assert 0 <= extent.y0 <= extent.y1 <= page.height, text.get_text()
        rows, columns = (
            slice(round(extent.y0), round(extent.y1)),
            slice(round(extent.x0), round(extent.x1)),
        )
        assert taken[rows, columns].size
        assert not taken[rows, columns].any(), text.get_text()
        taken[rows, columns] = True
    workers = sum(t.startswith("worker ") for t in texts(figure))
    assert 1 <= workers <= 32


def test_a_picture_without_matplotlib_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = tmp_path / "p"
    assert main(["inspect", "--tree", "1,4_64,32", "--divider", "fixed", "--svg", str(path)]) == 2
    error = capsys.readouterr().err
    assert "install it with pip install 'vllm-prefixshare[plots]'" in error
    assert error.count("\n") == 1
    assert not path.exists()


def test_a_picture_that_cannot_be_written_gets_one_sentence(tmp_path, capsys):
    assert main(["inspect", "--divider", "fixed", "--svg", str(tmp_path / "no" / "p")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_gpu_that_was_measured_has_its_table():
    shape = AttentionConfig(32, 8, 128, 16)
    found = Layer.on("h200", shape)
    assert isinstance(found.cost, CostTable)
    assert (found.config.num_workers, found.config.divider) == (16, "depth_first")
    with pytest.raises(PrefixShareError, match="'H300' is not known: use one of A10, A100"):
        Layer.on("H300", shape)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("name", [name for name in GPUS if name != "H200"])
def test_another_gpu_has_a_roofline_scaled_by_its_memory(name, head_dim):
    found = Layer.on(name, AttentionConfig(32, 8, head_dim, 16))
    assert isinstance(found.cost, AnalyticCost)
    assert "not measured" in found.cost_source
    gpu = GPUS[name]
    blocks, measured = 1, 3.15e4  # of the Hopper kernel
    if gpu.capability != (9, 0):
        memory = SHARED_MEMORY[gpu.capability] << 10
        tile = q_tile(head_dim, Gpu(gpu.capability, gpu.multiprocessors, memory))
        blocks, measured = tile.blocks_per_sm, 2 * 1.9e4  # two on an H200's multiprocessor
    whole = found.cost.roofline.bytes_per_us * blocks * gpu.multiprocessors
    assert whole / gpu.gb_per_s == pytest.approx(measured * 132 / 4800)


def test_an_estimate_on_the_gpu_that_was_measured_is_not_scaled():
    without_a_table = AttentionConfig(32, 8, 96, 16)
    found = Layer.on("H200", without_a_table)
    assert found.cost == analytic_cost(without_a_table, "hopper")
    assert found.cost_source == "roofline of NVIDIA H200"
