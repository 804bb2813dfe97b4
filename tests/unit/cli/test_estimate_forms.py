"""``estimate`` of every form in which people keep prompts, compared with golden outputs.

``UPDATE_GOLDEN=1 python -m pytest tests/unit/cli/test_estimate_forms.py`` writes them again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_runs import PROGRAM, run
from tests.support.processes import run_python
from vllm_prefixshare.cli.main import main

OPTIONS = ["--output-tokens", "64", "--batch", "6,24"]
GOLDEN = Path(__file__).parent / "golden"
#: Two documents, about which questions alternate.
RULES = "keep the lamps clean and the doors shut. " * 200
HANDBOOKS = [f"Handbook {name}: {RULES}" for name in "AB"]
QUESTIONS = [f"What does chapter {i} say?" for i in range(24)]
TEXTS = [HANDBOOKS[i % 2] + question for i, question in enumerate(QUESTIONS)]
IDS = [[1 + i % 2, *range(1000, 3000), i, 7] for i in range(24)]


def chat(question: str) -> list[dict[str, str]]:
    handbook = HANDBOOKS[QUESTIONS.index(question) % 2]
    return [{"role": "system", "content": handbook}, {"role": "user", "content": question}]


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def openai_batch(url: str, *bodies: dict) -> str:
    return lines(
        *(
            {"custom_id": f"task-{i}", "method": "POST", "url": url, "body": {"model": "m", **body}}
            for i, body in enumerate(bodies)
        )
    )


def log() -> str:
    """Eight requests each second, as vLLM's request logger writes it."""
    return "(APIServer pid=1) INFO 11-22 04:00:00 [api_server.py:1] Started\n" + "".join(
        f"(APIServer pid=1) DEBUG 11-22 04:00:{i // 8:02d} [request_logger.py:55] Request cmpl-{i} "
        f"details: prompt: 'x', prompt_token_ids: {ids}, prompt_embeds shape: None.\n"
        for i, ids in enumerate(IDS)
    )


#: form -> file name, content
FORMS = {
    "text_lines": ("p.jsonl", lines(*TEXTS)),
    "messages": ("p.jsonl", lines(*({"messages": chat(q)} for q in QUESTIONS))),
    "bare_chats": ("p.jsonl", lines(*map(chat, QUESTIONS))),
    "bare_lists": ("p.jsonl", lines(*IDS)),
    "openai_chat": (
        "p.jsonl",
        openai_batch("/v1/chat/completions", *({"messages": chat(q)} for q in QUESTIONS)),
    ),
    "openai_completions": (
        "p.jsonl",
        openai_batch("/v1/completions", {"prompt": TEXTS[:20]}, {"prompt": TEXTS[20], "n": 4}),
    ),
    "verl": (
        "p.jsonl",
        lines(*({"data_source": "handbook", "prompt": chat(q)} for q in QUESTIONS)),
    ),
    "trl": ("p.jsonl", lines(*({"prompt": text, "completion": "-"} for text in TEXTS))),
    "text": ("p.txt", "\n\n".join(TEXTS)),
    "log": ("server.log", log()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_its_golden_output(tmp_path, capsys, form):
    name, content = FORMS[form]
    path = tmp_path / name
    path.write_text(content)
    assert main(["estimate", str(path), "--gpu", "H200", *OPTIONS]) == 0
    said = capsys.readouterr().out
    golden = GOLDEN / f"estimate_{form}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(said)
    assert said == golden.read_text()


def test_golden_outputs_are_of_forms():
    assert {path.stem for path in GOLDEN.iterdir()} == {f"estimate_{form}" for form in FORMS}


@pytest.mark.parametrize(
    ("form", "options"),
    [("text_lines", []), ("text", ["--format", "text"]), ("log", ["--format", "log"])],
)
def test_standard_input_is_read_as_a_file(form, options):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "estimate", "-", "--gpu", "H200", *OPTIONS, *options],
        input=FORMS[form][1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (GOLDEN / f"estimate_{form}.txt").read_text()


def test_a_pipe_with_a_name_is_read_once(tmp_path):
    shell = f"{sys.executable} -c '{PROGRAM}' estimate <(cat) --gpu H200 {' '.join(OPTIONS)}"
    done = subprocess.run(
        ["bash", "-c", shell],
        input=FORMS["text_lines"][1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (GOLDEN / "estimate_text_lines.txt").read_text()


WITHOUT = """
import sys
for name in ("torch", "triton", "vllm", "transformers"):
    sys.modules[name] = None
from vllm_prefixshare.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("tokenizer", [False, True])
def test_neither_torch_nor_vllm_is_needed(tmp_path, tokenizer):
    from examples.embedded_model import embedded_model_path

    path = tmp_path / "p.jsonl"
    path.write_text(FORMS["text_lines"][1])
    words = ["estimate", str(path), "--gpu", "H200", *OPTIONS]
    if tokenizer:
        words += ["--tokenizer", str(embedded_model_path())]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if not tokenizer:
        assert done.stdout == (GOLDEN / "estimate_text_lines.txt").read_text()


def test_what_takes_seconds_to_import_is_not_imported(tmp_path):
    path = tmp_path / "prompts"
    path.write_text(FORMS["text_lines"][1])
    code = """
import sys
from vllm_prefixshare.cli.main import main
assert main(["estimate", sys.argv[1], "--gpu", "H200"]) == 0
assert not {"torch", "triton", "vllm"} & sys.modules.keys()
"""
    run_python(code, path)


def test_messages_are_tokenized_by_the_chat_template(tmp_path):
    from transformers import AutoTokenizer

    from examples.embedded_model import embedded_model_path
    from vllm_prefixshare.cli.tokenization import CheckpointTokenizer

    folder = str(embedded_model_path())
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = CheckpointTokenizer(folder)
    for messages in map(chat, QUESTIONS):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = theirs.encode(expected, add_special_tokens=False)
        assert ours.encode_chat(messages, None).tolist() == ids
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        assert ours.encode_chat(parts, None).tolist() == ids
    for text in (*TEXTS, TEXTS[0] * 9, TEXTS[0] * 9 + "?", ""):  # long ones pass through the memo
        assert ours.encode(text).tolist() == theirs.encode(text)
    path = tmp_path / "p.jsonl"
    path.write_text(FORMS["messages"][1])
    done = run("estimate", path, "--gpu", "H200", "--tokenizer", folder)
    assert done.returncode == 0, done.stderr
    assert f"tokens of {folder}" in done.stdout


def test_a_text_is_tokenized_once():
    from examples.embedded_model import embedded_model_path
    from vllm_prefixshare.cli.tokenization import CheckpointTokenizer

    class Counting:
        def __init__(self, backend):
            self._backend = backend
            self.characters = 0

        def encode(self, text, **options):
            self.characters += len(text)
            return self._backend.encode(text, **options)

    tokenizer = CheckpointTokenizer(str(embedded_model_path()))
    tokenizer._backend = counting = Counting(tokenizer._backend)
    for _ in range(8):
        tokenizer.encode("one question")
    assert counting.characters == len("one question")
    document = CheckpointTokenizer(str(embedded_model_path()))
    document.encode(TEXTS[0])
    _, known = document._memo.encode(TEXTS[2], True)
    assert known > len(TEXTS[2]) - 1024


@pytest.mark.parametrize(
    ("name", "content", "options", "sentence"),
    [
        ("p.txt", "\n\n", [], "has no prompts"),
        ("p.json", '[\n"one",\n', [], "line 1 of"),
        ("p.jsonl", "INFO 11-22 04:00:00\n", [], "line 1 of"),
        ("p.jsonl", '{"text": "one"}\n', [], "neither text nor token ids"),
        ("p.jsonl", '{"body": {"prompt": "one", "n": -1}}\n', [], "n must be an integer from 1"),
        ("p.jsonl", '{"prompt": "one", "n": "8"}\n', [], "n must be an integer from 1"),
        ("p.jsonl", '{"messages": [{"role": "user", "content": 7}]}\n', [], "the content of a"),
        ("p.jsonl", '"one"\n', ["--format", "log"], "has no prompts"),
        ("p.jsonl", '"one"\n', ["--batch", "1,x"], "--batch must be from 1 to"),
        ("p.jsonl", '"one"\n', ["--samples", "0"], "--samples must be from 1 to"),
        ("p.jsonl", '"one"\n', ["--limit", "0"], "--limit must be from 1 to"),
        ("p.jsonl", '"one"\n', ["--num-layers", "0"], "--num-layers must be from 1 to"),
        ("p.jsonl", '"one"\n', ["--tensor-parallel-size", "3"], "must divide the model's 32"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, capsys, name, content, options, sentence):
    path = tmp_path / name
    path.write_text(content)
    assert main(["estimate", str(path), "--gpu", "H200", *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("p", "\n".join(TEXTS), ["--format", "text"]),
        ("p.jsonl", lines(*({"i": i, "prompt": text, "n": 1} for i, text in enumerate(TEXTS))), []),
        ("p.jsonl", lines({"n": 0, "prompt": TEXTS}), []),
        ("p.txt", lines(*TEXTS), ["--format", "json"]),
        ("p.jsonl", lines(TEXTS), []),
        ("p.jsonl", lines({"prompt": TEXTS}), []),
    ],
)
def test_other_ways_to_write_the_same_prompts(tmp_path, capsys, name, content, options):
    def report(path: Path, *options: str) -> dict:
        assert main(["estimate", str(path), "--gpu", "H200", "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        del found["file"]
        for one in found["prefix_cache"]["breaks"]:
            del one["first"], one["differs_from"]  # several prompts may be on a line
        return found

    expected = tmp_path / "expected.jsonl"
    expected.write_text(lines(*TEXTS))
    path = tmp_path / name
    path.write_text(content)
    assert report(path, *options) == report(expected)
