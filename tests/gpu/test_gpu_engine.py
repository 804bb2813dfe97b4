"""PREFIX_SHARE inside a real vLLM engine on a GPU, under both model runners.

The log-probabilities of each answer in decode are compared with those that stock FLASH_ATTN gives
the same tokens in prefill. Texts part at the first tie; log-probabilities do not, so every token
counts. Each test also asserts that its subject took place.

    python -m pytest -m gpu tests/gpu/test_gpu_engine.py
    PREFIXSHARE_TEST_MODEL=FOLDER python -m pytest -m gpu tests/gpu/test_gpu_engine.py  # real ones
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import gpu_engines as cases
from tests.support.dummy_model import write_eagle, write_lora, write_small_llama
from tests.support.engine import ONE_PROCESS, PREFIX_SHARE, RUNNERS, EngineProcess
from tests.support.engine_steps import drive
from tests.support.gpu_engines import (
    DOCUMENT,
    PRIVATE,
    Text,
    assert_as_stock,
    assert_same_texts,
    assert_shared,
    drive_primed,
    engines,
    extension,
    greedy,
    llama_128,
    prime,
)
from tests.support.gpu_layer import HOPPER, TWO_GPUS, missing, on_gpu_with
from tests.support.new_weights import update_weights
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.planning.planner import MIN_STEPS

pytestmark = on_gpu_with("vllm")
RAY = pytest.mark.skipif(bool(missing("ray")), reason="needs Ray")
SHORT_QUESTIONS = pytest.mark.skipif(
    not HOPPER, reason="short questions are planned on Hopper GPUs only"
)

#: serves no short windows
PORTABLE = {"VLLM_PREFIXSHARE_KERNEL": "portable"}
#: 256 blocks hold 4096 tokens: enough for several tests, too few for one. 512 tokens a step, so
#: that prefill is chunked and mixes with decode.
FEW = {"num_gpu_blocks_override": 256, "max_num_batched_tokens": 512}


@contextmanager
def three(
    model: Path, options: dict[str, Any], **stock_options: Any
) -> Iterator[dict[str, EngineProcess]]:
    """Engines by name: stock, and PREFIX_SHARE under each runner."""
    specs = [cases.ours(model, runner, **options) for runner in RUNNERS]
    with engines(cases.stock(model, **stock_options), *specs) as started:
        yield dict(zip(("stock", *RUNNERS), started, strict=True))


@pytest.fixture(scope="module")
def all_three(model: Path) -> Iterator[dict[str, EngineProcess]]:
    with three(model, {**FEW, **extension(cases.EveryQuestion)}) as started:
        for runner in RUNNERS:
            started[runner].collective_rpc("plan_every_question")
        yield started


@pytest.fixture(scope="module")
def stock(all_three: dict[str, EngineProcess]) -> EngineProcess:
    return all_three["stock"]


@pytest.fixture(params=list(RUNNERS))
def engine(request: pytest.FixtureRequest, all_three: dict[str, EngineProcess]) -> EngineProcess:
    """PREFIX_SHARE in the default CUDA-graph mode, with an empty prefix cache."""
    host = all_three[request.param]
    host.reset_prefix_cache()
    assert host.call(cases.uses_v2) == (request.param == "V2")
    return host


def test_requests_on_one_document(engine, stock, text):
    prompts = text.asking(DOCUMENT, [64] * 11)  # padded: 11 is no captured size
    run = drive_primed(engine, prompts, greedy(96))
    assert_as_stock(run, stock)
    assert_shared(run, factor=1.5)
    assert len(run.completions) == 11 and run.preemptions == 0
    assert run.stats["decode_steps"] >= 95
    # a new plan where a request joins or ends, and where new tokens have unbalanced the workers
    assert run.stats["plans"] <= 2 * 11 + 4 + 96 // MIN_STEPS


def test_a_wrong_block_would_show(engine, stock, text):
    """A wrong block exceeds the limits that all these tests use."""
    prompts = text.asking(DOCUMENT, [64] * 3)
    run = drive_primed(engine, prompts, greedy(40))
    assert_as_stock(run, stock)
    # one block with random weights; natural text depends less on any single block
    first, last = (0, DOCUMENT // 2) if text.is_real else (512, 528)
    other = tuple(text.part(15000, last - first))
    wrong = [
        replace(c, prompt_ids=c.prompt_ids[:first] + other + c.prompt_ids[last:])
        for c in run.completions
    ]
    assert all(e.mean() > 2 * cases.MEAN_ERROR for e in cases.errors(wrong, stock))


def test_requests_that_end_at_different_times(engine, stock, text):
    prompts = text.asking(DOCUMENT, [20, 33, 5, 64]) + text.asking(DOCUMENT // 2, [9, 17, 48])
    lengths = [5, 70, 33, 16, 48, 2, 61]
    run = drive_primed(engine, prompts, [greedy(n) for n in lengths])
    assert [len(c.token_ids) for c in run.completions] == lengths
    assert_as_stock(run, stock)
    assert_shared(run, factor=1.1)
    assert run.stats["plans"] < run.stats["decode_steps"]


def test_nothing_shared(engine, stock, text):
    prompts = [text.part(1000 * i, 300 + 7 * i) for i in range(7)]
    run = engine.call(drive, prompts, greedy(48))
    assert_as_stock(run, stock)
    assert run.stats["decode_steps"] >= 47
    assert run.stats["shared_steps"] == 0
    if engine.call(cases.uses_v2):
        # prompts are rows of plans, too, which may be read in more and smaller tiles than stock's
        assert run.stats["kv_tokens_read"] < 2 * run.stats["kv_tokens_stock"]
    else:
        assert run.stats["kv_tokens_read"] == run.stats["kv_tokens_stock"]


def test_chunked_prefill_mixes_with_decode(engine, stock, text):
    # the short prompts decode while the long ones are still in prefill, 512 tokens a step
    prompts = [*text.asking(400, [16, 24, 40]), text.part(3000, 1100), text.part(5000, 900)]
    run = drive_primed(engine, prompts, greedy(40))
    assert_as_stock(run, stock)
    assert run.stats["shared_steps"] > 0
    # each request has 39 decode steps; the short prompts begin at least two steps earlier
    assert run.stats["decode_steps"] >= 41


@SHORT_QUESTIONS
def test_short_questions_on_a_cached_document(engine, stock, text):
    prompts = text.asking(DOCUMENT, [5, 12, 2, 9, 11, 7] * 2)
    run = drive_primed(engine, prompts, greedy(24))
    assert_as_stock(run, stock)
    assert_shared(run, factor=2.0)
    # the step that reads the questions counts as one of decodes; requests that arrive late begin
    # in a later one, and few of them share nothing
    assert run.stats["decode_steps"] >= 24
    assert run.stats["shared_steps"] >= 23
    assert run.stats["kv_tokens_stock"] >= 24 * 12 * DOCUMENT


def test_short_questions_beside_decodes_and_a_long_prompt(engine, stock, text):
    prompts = [*text.asking(DOCUMENT, [5, 12, 2, 9, 33, 7] * 2), text.part(9000, 700)]
    run = drive_primed(engine, prompts, [greedy(n) for n in (9, 2, 5) * 4] + [greedy(20)])
    assert_as_stock(run, stock)
    assert_shared(run)


def test_several_samples_of_one_prompt(engine, stock, text):
    prompts = text.asking(DOCUMENT, [30])
    # with few samples of so short a prompt plans for an H100 share nothing
    run = engine.call(drive, prompts, {**greedy(48), "n": 16, "temperature": 0.8})
    assert len({c.token_ids for c in run.completions}) == 16
    assert_as_stock(run, stock)
    assert_shared(run, factor=2.0)


def test_pre_empted_requests_come_back_right(engine, stock, text):
    prompts = text.asking(1024, [40 + i for i in range(12)])
    run = drive_primed(engine, prompts, greedy(280))
    assert run.preemptions > 0
    assert all(len(c.token_ids) == 280 for c in run.completions)
    assert_as_stock(run, stock)
    assert_shared(run)


def test_the_prefix_cache_is_reset_under_running_requests(engine, stock, text):
    prompts = text.asking(DOCUMENT, [32] * 15)
    # early: on a busy machine the engine is many steps ahead of those that this process has seen
    run = drive_primed(engine, prompts, greedy(96), partial(cases.reset_at, when=5))
    assert run.preemptions == len(prompts)
    assert all(len(c.token_ids) == 96 for c in run.completions)
    assert_as_stock(run, stock)
    assert_shared(run)
    engine.reset_prefix_cache()
    again = engine.call(drive, prompts, greedy(16))
    assert_as_stock(again, stock)
    assert again.stats["shared_steps"] > 0  # the steps that compute the document count, too


@pytest.mark.parametrize("level", [1, 2])
def test_new_weights_after_a_sleep(random_model, level, tmp_path):
    other = write_small_llama(tmp_path / "other", seed=1)
    options = {**cases.QUICK, "enable_sleep_mode": True}
    prompts = Text(random_model).asking(DOCUMENT, PRIVATE)
    with engines(cases.stock(other), cases.ours(random_model, **options)) as (stock, engine):
        assert_shared(drive_primed(engine, prompts, greedy(48)))
        engine.call(update_weights, other, level)
        run = drive_primed(engine, prompts, greedy(48))
        assert_as_stock(run, stock)
        assert_shared(run)


def test_aborted_requests_leave_the_others_right(engine, stock, text):
    prompts, gone = text.asking(DOCUMENT, [16] * 15), [0, 3, 6, 14]
    run = drive_primed(engine, prompts, greedy(60), partial(cases.abort_at, when=25, which=gone))
    lengths = [len(c.token_ids) for c in run.completions]
    assert [c.finished for c in run.completions] == [i not in gone for i in range(15)]
    assert all(n == 60 for i, n in enumerate(lengths) if i not in gone)
    assert all(0 < lengths[i] < 60 for i in gone)
    assert_as_stock(run, stock)
    assert_shared(run, factor=2.0)
    # new requests get the blocks of the aborted requests
    assert_as_stock(
        engine.call(drive, text.asking(DOCUMENT, [77] * 3, start=60), greedy(24)), stock
    )


def test_beam_search(engine, stock, text):
    # Each step computes the tokens after the cached blocks, as a short question. A beam is a decode
    # row only where that is a single token: once a block. Whether two beams decode in the same step
    # is random.
    prompts = text.asking(480, [5, 40])
    run = engine.call(cases.beam_search, prompts, 3, 36)
    assert len(run.completions) == 6
    assert all(len(c.token_ids) == 36 for c in run.completions)
    assert_as_stock(run, stock)
    assert run.stats["decode_steps"] > 0


@pytest.fixture(scope="module")
def wide(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Text, dict[str, EngineProcess]]]:
    model = llama_128(tmp_path_factory.mktemp("wide"))
    options = {**cases.QUICK, "block_size": 32}
    with three(model, options, enforce_eager=True) as started:
        yield Text(model), started


@pytest.mark.parametrize("runner", RUNNERS)
def test_head_dim_128(wide, runner):
    text, started = wide
    prompts = [*text.asking(DOCUMENT, PRIVATE), text.part(9000, 130)]
    run = drive_primed(started[runner], prompts, greedy(48))
    assert_as_stock(run, started["stock"])
    assert_shared(run, factor=2.0)


def test_speculative_rows(model, stock, text):
    # Rows of 1 to 4 query tokens, causal among themselves. With three tokens to choose from, the
    # text repeats itself, so that tokens are drafted and some are accepted.
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    options = {**cases.QUICK, "block_size": 64, "speculative_config": speculation}
    prompts = text.asking(DOCUMENT, PRIVATE)
    few_tokens = {**greedy(60), "allowed_token_ids": text.part(0, 3)}
    with engines(cases.ours(model, "V1", **options)) as (engine,):
        run = drive_primed(engine, prompts, [few_tokens] * 9 + [greedy(60)] * 6)
        short = engine.call(drive, prompts, few_tokens)
        drafted = engine.call(cases.metric, "vllm:spec_decode_num_draft_tokens")
        accepted = engine.call(cases.metric, "vllm:spec_decode_num_accepted_tokens")
    assert 0 < accepted < drafted
    assert short.stats["decode_steps"] < 60
    for batch in (run, short):
        assert_as_stock(batch, stock)
        assert_shared(batch, factor=1.5)
        assert batch.stats["plans"] < batch.stats["decode_steps"] / 2


@pytest.fixture(scope="module")
def drafting(
    random_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, EngineProcess]]:
    drafter = write_eagle(tmp_path_factory.mktemp("eagle"), random_model)
    speculation = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 3}
    # the layers of the draft model keep the parent's kernel
    options = {**cases.QUICK, "env": cases.LENIENT, "speculative_config": speculation}
    with three(random_model, options, enforce_eager=True) as started:
        yield started


@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_that_a_draft_model_proposed(random_model, drafting, runner):
    # few drafts are accepted, so lengths on the host run ahead of lengths on the GPU
    engine = drafting[runner]
    prompts = Text(random_model).asking(DOCUMENT, PRIVATE)
    run = drive_primed(engine, prompts, greedy(60))
    assert engine.call(cases.metric, "vllm:spec_decode_num_draft_tokens") > 0
    assert_as_stock(run, drafting["stock"])
    assert_shared(run, factor=1.5)


@pytest.fixture(scope="module")
def windowed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Text, dict[str, EngineProcess]]]:
    model = write_small_llama(tmp_path_factory.mktemp("windowed"), sliding_window=64)
    options = {**cases.QUICK, "env": {**cases.LENIENT, **PORTABLE}}
    with three(model, options, enforce_eager=True) as started:
        yield Text(model), started


@pytest.mark.parametrize("runner", RUNNERS)
def test_sliding_window_layers_keep_the_parents_kernel(windowed, runner):
    # the portable kernel loses in such short windows. Two groups of layers, each with its own block
    # table; only one group is planned for
    text, started = windowed
    prompts = text.asking(DOCUMENT, PRIVATE)
    run = drive_primed(started[runner], prompts, greedy(64))
    assert_as_stock(run, started["stock"])
    assert_shared(run, factor=2.0)
    assert 63 <= run.stats["decode_steps"] < 100, "once a step, not once for each group"


def test_lora(random_model, tmp_path):
    # texts are compared, because vLLM computes no log-probabilities of prompts under an adapter
    adapter = str(write_lora(tmp_path / "adapter", random_model))
    options = {**cases.QUICK, "enable_lora": True, "max_lora_rank": 8}
    spec = cases.ours(random_model, **options)
    with engines(spec, cases.stock(random_model, **options)) as (engine, reference):
        prompts = Text(random_model).asking(DOCUMENT, PRIVATE) * 2
        adapters = [adapter] * len(PRIVATE) + [None] * len(PRIVATE)
        # KV differs with and without the adapter: two trees
        engine.call(drive, [prompts[0]] * 2, greedy(1), None, [adapter, None])
        run, expected = (
            host.call(drive, prompts, greedy(48), None, adapters) for host in (engine, reference)
        )
    assert_same_texts(run, expected)
    assert_shared(run, factor=1.5)
    answers = [c.token_ids for c in run.completions]
    halves = answers[: len(PRIVATE)], answers[len(PRIVATE) :]
    assert all(a != b for a, b in zip(*halves, strict=True)), "no effect"


@pytest.fixture(
    scope="module",
    params=["tensor mp", "pipeline mp", pytest.param("tensor ray", marks=RAY)],
)
def parallel(
    request: pytest.FixtureRequest, random_model: Path
) -> Iterator[dict[str, EngineProcess]]:
    kind, executor = request.param.split()
    size = {f"{kind}_parallel_size": 2, "distributed_executor_backend": executor}
    options = {**cases.QUICK, **size}
    with three(random_model, options, enforce_eager=True) as started:
        yield started


@TWO_GPUS
@pytest.mark.parametrize("runner", RUNNERS)
def test_two_gpus(random_model, parallel, runner):
    engine = parallel[runner]
    prompts = Text(random_model).asking(DOCUMENT, PRIVATE)
    run = drive_primed(engine, prompts, greedy(64))
    assert_as_stock(run, parallel["stock"])
    assert_shared(run, factor=2.0)
    # with two pipeline stages the batch is split in two parts, each with its own plan
    assert run.stats["plans"] < run.stats["decode_steps"] / 2


@pytest.fixture(scope="module", params=[(1, "ag_rs"), (16, "a2a")], ids=lambda p: f"{p[0]} {p[1]}")
def sharded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Text, dict[str, EngineProcess]]]:
    # vLLM shards KV heads that ranks would hold twice: one head on two ranks
    model = write_small_llama(tmp_path_factory.mktemp("one_head"), num_kv_heads=1)
    interleave, collective = request.param
    options = {
        **cases.QUICK,
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": interleave,
        "dcp_comm_backend": collective,
        "worker_extension_cls": "tests.support.sharded_worker.ShardedWorker",
        "distributed_executor_backend": "mp",
        "max_num_batched_tokens": 512,  # prefill is chunked and mixes with decode
    }
    with three(model, options, **options) as started:
        yield Text(model), started


@TWO_GPUS
@pytest.mark.parametrize("runner", RUNNERS)
def test_decode_context_parallelism(sharded, runner):
    text, started = sharded
    # the last prompt leaves the second rank's shard empty for up to 16 tokens
    prompts = [*text.asking(DOCUMENT, PRIVATE), text.part(5000, 900), text.part(9000, 1)]
    hook = partial(cases.count_layers_from, when=20)
    run = drive_primed(started[runner], prompts, greedy(64), hook)
    assert started[runner].call(cases.uses_v2) == (runner == "V2")
    assert started[runner].collective_rpc("count_layers") == [0, 0], "FULL graphs are replayed"
    assert_as_stock(run, started["stock"])
    assert_same_texts(run, drive_primed(started["stock"], prompts, greedy(64)))
    assert_shared(run, factor=1.5)
    assert run.stats["plans"] < run.stats["decode_steps"] / 2


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_step_does_not_synchronise_and_replays_full_graphs(model, stock, text, runner):
    # 64-token blocks: the test does not depend on the block size
    with engines(cases.ours(model, runner, block_size=64, env=ONE_PROCESS)) as (engine,):
        prompts = text.asking(DOCUMENT, PRIVATE)
        prime(engine, prompts)
        seen = engine.call(cases.watched, prompts, 64, 8)
    assert seen["caught"], "a call that synchronises must raise"
    assert seen["builds"] >= 64
    assert seen["layers"] > 0, "prefill must call layers"
    assert seen["forwards"] == 0, "decode must replay FULL graphs"
    run = seen["run"]
    assert_as_stock(run, stock)
    assert_shared(run, factor=2.0)
    assert run.stats["plans"] < run.stats["decode_steps"] / 2


def test_a_layer_that_is_not_served_is_refused_under_strict(tmp_path):
    model = write_small_llama(tmp_path / "windowed", sliding_window=64)
    # another process hides the reason
    spec = cases.ours(model, env={**ONE_PROCESS, **PORTABLE})
    with pytest.raises(PrefixShareError, match=r"a sliding window.* STRICT=1"), engines(spec):
        pass


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("VLLM_PREFIXSHARE_SPEED", "9", "VLLM_PREFIXSHARE_SPEED is not a known variable"),
        ("VLLM_PREFIXSHARE_SHARE", "maybe", "VLLM_PREFIXSHARE_SHARE='maybe' is not valid"),
        ("VLLM_PREFIXSHARE_DIVIDER", "best", "divider 'best' is unknown"),
    ],
)
def test_a_wrong_setting_is_refused_at_start_up(random_model, variable, value, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        EngineProcess(PREFIX_SHARE, random_model, {variable: value}, **cases.SETTINGS)
