"""Tokens of a real engine through PREFIX_SHARE, compared with stock vLLM on real prompts.

Each test also asserts that its subject took place: shared steps, reused plans. Pre-emption is in
``test_chaos.py``.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import DOCUMENT, ENVIRONMENT, SETTINGS
from tests.support.dummy_model import write_small_gemma3
from tests.support.engine import ONE_PROCESS, PREFIX_SHARE, STOCK, Batch, EngineProcess, divergences
from tests.support.new_weights import pack_output_layer, update_weights, write_changed_copy
from vllm_prefixshare import PrefixShareError

pytestmark = pytest.mark.engine

NUM_LAYERS = 30
MAX_GAP = 0.05  # nats
QUESTIONS = (
    "What does the prefix tree hold?",
    "What is a work tile?",
    "Why does a plan stay valid?",
    "What does the cost table measure?",
    "How are partial results merged?",
    "What is a divider?",
)


def ask(question: str, document: str = DOCUMENT) -> str:
    return f"Document:\n\n{document}\n\nQuestion: {question}\nAnswer:"


def assert_same_tokens(ours: Batch, stock: Batch) -> None:
    wrong = [d for d in divergences(ours, stock) if d.gap > MAX_GAP]
    assert not wrong, f"tokens differ where stock was sure: {wrong}"


def assert_shared(batch: Batch, factor: float = 1.2, num_layers: int = NUM_LAYERS) -> None:
    stats = batch.stats
    assert stats["shared_steps"] > 0
    assert stats["layer_calls"] == stats["shared_steps"] * num_layers
    assert stats["kv_tokens_stock"] > factor * stats["kv_tokens_read"]


def test_questions_about_one_document(both):
    prompts = [ask(q) for q in QUESTIONS]
    both(prompts[:1], 1)  # puts the document into the prefix cache
    ours, stock = both(prompts, 40, ignore_eos=True)
    assert_same_tokens(ours, stock)
    assert_shared(ours, factor=3.0)
    assert ours.answers[-1].num_cached_tokens >= 1024
    # one request may decode alone while the others are still in prefill
    assert ours.stats["shared_steps"] >= ours.stats["decode_steps"] - 2
    # a request that joins alone needs a new plan; steady decode must not plan
    assert ours.stats["plans"] <= len(QUESTIONS) < 30 < ours.stats["decode_steps"]


def test_requests_that_end_at_different_times(both):
    half = DOCUMENT[: len(DOCUMENT) // 2]
    prompts = [ask(q, d) for q in QUESTIONS[:4] for d in (DOCUMENT, half)]
    ours, stock = both(prompts, 60)  # each request ends with its own end-of-sequence token
    assert_same_tokens(ours, stock)
    assert_shared(ours)
    assert ours.stats["plans"] < ours.stats["decode_steps"]


def test_a_document_that_is_not_cached_is_computed_once(both):
    prompts = [ask(q, "A copy that is new.\n" + DOCUMENT) for q in QUESTIONS]
    for batch in both(prompts, 4, ignore_eos=True):
        computed = [a.num_prompt_tokens - a.num_cached_tokens for a in batch.answers]
        # the others compute their questions, and the block that these begin in
        assert max(computed) > 1024 > sum(computed) - max(computed)


def test_nothing_shared_runs_as_stock(both):
    prompts = [f"{i} " + DOCUMENT[1000 * i : 1000 * i + 700] for i in range(4)]
    ours, stock = both(prompts, 12, ignore_eos=True)
    assert_same_tokens(ours, stock)
    assert ours.stats["shared_steps"] == 0
    assert ours.stats["kv_tokens_read"] == ours.stats["kv_tokens_stock"]
    assert ours.stats["unshared_plans"]["no common prefix"] > 0
    assert len(ours.stats["kernels"]) == 1


def test_chunked_prefill_mixes_with_shared_decode(both):
    # short prompts decode while the long ones are still in prefill, 512 tokens a step
    short = [ask(q, DOCUMENT[:2500]) for q in QUESTIONS[:3]]
    both(short[:1], 1)
    ours, stock = both([*short, DOCUMENT[200:], DOCUMENT[700:]], 24, ignore_eos=True)
    assert_same_tokens(ours, stock)
    assert_shared(ours)


def test_several_samples_of_one_prompt(both):
    # No request has its own seed, which CPU sampling of vLLM 0.32 does not support. Both engines
    # draw from generators in the same state, because only this test draws.
    options = {"n": 5, "temperature": 0.8, "ignore_eos": True}
    ours, stock = both([ask(QUESTIONS[0])], 24, **options)
    assert len(ours.answers) == 5
    assert len({a.token_ids for a in ours.answers}) > 1
    assert_same_tokens(ours, stock)
    assert_shared(ours, factor=2.0)


def search(llm, prompts: list[str], width: int, max_tokens: int) -> list[list[tuple]]:
    """The sequences of ``LLM.beam_search``: tokens, text, score, log-probabilities of positions."""
    from vllm.sampling_params import BeamSearchParams

    found = llm.beam_search(
        [{"prompt": prompt} for prompt in prompts], BeamSearchParams(width, max_tokens)
    )
    return [
        [
            (
                list(beam.tokens),
                beam.text,
                beam.cum_logprob,
                [{token: entry.logprob for token, entry in p.items()} for p in beam.logprobs],
            )
            for beam in output.sequences
        ]
        for output in found
    ]


def test_beams_match_vllm(ours, stock):
    prompts = [ask(q, DOCUMENT[:1500]) for q in QUESTIONS[:2]]
    found, expected = (engine.call(search, prompts, 8, 6) for engine in (ours, stock))
    for one, other in zip(found, expected, strict=True):
        assert len(one) == 8
        for (*same, score, logprobs), theirs in zip(one, other, strict=True):
            assert tuple(same) == theirs[:2]
            assert score == pytest.approx(theirs[2], abs=1e-3)
            for position, their_position in zip(logprobs, theirs[3], strict=True):
                assert position.keys() == their_position.keys()
                assert position == pytest.approx(their_position, abs=1e-3)


def next_tokens(checkpoint: Path, prompt: str, count: int) -> tuple[int, ...]:
    """The greedy tokens of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(checkpoint)(prompt, return_tensors="pt")
    tokens = model.generate(
        **inputs, do_sample=False, min_new_tokens=count, max_new_tokens=count, eos_token_id=-1
    )
    return tuple(tokens[0, inputs["input_ids"].shape[1] :].tolist())


def test_new_weights_in_a_live_engine(both, ours, stock, model, tmp_path):
    prompts = [ask(q, DOCUMENT[:600]) for q in QUESTIONS[:3]]
    before, _ = both(prompts, 12, ignore_eos=True)
    changed = write_changed_copy(model, tmp_path / "changed")
    try:
        for engine in (ours, stock):
            engine.call(update_weights, changed, 1)
            engine.call(pack_output_layer)
        batch, expected = both(prompts, 12, ignore_eos=True)
    finally:  # other tests have the same engines
        for engine in (ours, stock):
            engine.call(update_weights, model, 1)
            engine.call(pack_output_layer)
    assert batch.answers[0].num_cached_tokens == 0, "the sleep has not emptied the prefix cache"
    assert_same_tokens(batch, expected)
    assert_shared(batch)
    assert batch.answers[0].token_ids == next_tokens(changed, prompts[0], 12)
    again, _ = both(prompts, 12, ignore_eos=True)
    tokens = [[answer.token_ids for answer in b.answers] for b in (before, batch, again)]
    assert tokens[0] == tokens[2] != tokens[1]


def test_speculative_rows_share_too(model, stock):
    # rows of 1 to 4 query tokens, causal among themselves; speculation must not change a token
    prompts = [ask(q) for q in QUESTIONS[:4]]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    settings = {**SETTINGS, "pause": False, "speculative_config": speculation}
    with EngineProcess(PREFIX_SHARE, model, ENVIRONMENT, **settings) as engine:
        engine.generate(prompts[:1], 1)
        ours = engine.generate(prompts, 40, ignore_eos=True)
    assert_same_tokens(ours, stock.generate(prompts, 40, gaps=True, ignore_eos=True))
    assert_shared(ours)
    assert ours.stats["decode_steps"] < 40, "some drafts must have been accepted"


def test_full_attention_in_one_group_with_windows_is_shared(tmp_path):
    # so are Llama 4's layers by default, and a model's with windows under some KV connectors
    windows = write_small_gemma3(tmp_path, sliding_window=64)  # one layer of six has none
    rng = np.random.default_rng(0)
    document = rng.integers(10, 500, 400).tolist()
    prompts = [document + rng.integers(10, 500, 5).tolist() for _ in range(4)]
    settings = {
        **SETTINGS,
        "pause": False,
        "max_model_len": 512,
        "num_gpu_blocks_override": 160,
        "disable_hybrid_kv_cache_manager": True,
    }
    batches = []
    for backend, environment in ((PREFIX_SHARE, ENVIRONMENT), (STOCK, ONE_PROCESS)):
        with EngineProcess(backend, windows, environment, **settings) as engine:
            engine.generate(prompts[:1], 1)
            batches.append(engine.generate(prompts, 12, gaps=True, ignore_eos=True))
    assert_same_tokens(*batches)
    assert_shared(batches[0], factor=3.0, num_layers=1)


@pytest.mark.parametrize(
    ("attention_config", "processes"),
    [
        # vLLM validates dictionaries before it loads general plugins; each process does
        ({"backend": "prefix_share"}, {}),
        ({"backend_per_kind": {"full_attention": "PREFIX_SHARE"}}, ONE_PROCESS),
    ],
)
def test_the_backend_is_chosen_by_a_dictionary(model, attention_config, processes):
    settings = {**SETTINGS, "pause": False, "attention_config": attention_config}
    environment = {
        **processes,
        "VLLM_PREFIXSHARE_SHARE": "always",
        "VLLM_PREFIXSHARE_STRICT": "1",
    }
    with EngineProcess(PREFIX_SHARE, model, environment, **settings) as engine:
        engine.generate([ask(QUESTIONS[0])], 1)
        batch = engine.generate([ask(q) for q in QUESTIONS[:3]], 8, ignore_eos=True)
    assert_shared(batch)


def test_a_wrong_setting_is_refused_before_work_starts(model):
    with pytest.raises(PrefixShareError, match="divider 'best' is unknown"):
        EngineProcess(PREFIX_SHARE, model, {"VLLM_PREFIXSHARE_DIVIDER": "best"})


def test_a_place_that_cannot_be_written_ends_no_engine(model):
    places = {"VLLM_PREFIXSHARE_TRACE": "/nowhere/t", "VLLM_PREFIXSHARE_METRICS": "/proc/none"}
    with EngineProcess(
        PREFIX_SHARE, model, {**ONE_PROCESS, **places}, **{**SETTINGS, "pause": False}
    ) as engine:
        assert engine.generate([ask(QUESTIONS[0])], 1).answers
