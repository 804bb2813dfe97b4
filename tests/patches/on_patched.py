"""Run by ``test_series`` on a patched vLLM: what each patch provides, and that no hook is
installed that it replaces.
"""

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import vllm
from vllm.platforms.interface import Platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention import selector
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops import flashmla
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import StagedContents
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

from tests.support import decoding
from tests.support import shared_prefixes as cases
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import FP8_MLA_BACKEND, MLA_BACKEND, register
from vllm_prefixshare.vllm_plugin.backends.cuda.backend import PrefixShareCUDABackend
from vllm_prefixshare.vllm_plugin.hooks import (
    activation,
    beams,
    block_hashes,
    copies,
    registry,
    runners,
    selection,
    tokenization,
)
from vllm_prefixshare.vllm_plugin.observability.stats import warming_up
from vllm_prefixshare.vllm_plugin.prompts import detokenization, parts
from vllm_prefixshare.vllm_plugin.prompts.block_hashes import SharedBlockHasher
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds
from vllm_prefixshare.vllm_plugin.step import host_tables
from vllm_prefixshare.vllm_plugin.step.gpu_builder import PlanningBuilder


@pytest.fixture(autouse=True)
def _registered():
    register.register()


#: What hooks change on a patched vLLM, too.
WITHOUT_PATCH = {hook.target for hook in beams.HOOKS} | {"vllm.logprobs.FlatLogprobs.append_fast"}


def hooked_functions(module: ModuleType) -> list[str]:
    """Functions of a module and of its classes that our hooks wrap, though a patch could."""
    owners = [module, *(c for _, c in inspect.getmembers(module, inspect.isclass))]
    return [
        f"{owner.__name__}.{name}"
        for owner in owners
        for name, value in vars(owner).items()
        if "_vllm_prefixshare_hook" in getattr(getattr(value, "__func__", value), "__dict__", ())
        and f"{module.__name__}.{owner.__name__}.{name}" not in WITHOUT_PATCH
    ]


@pytest.mark.parametrize(
    "name", sorted({h.module for h in registry.HOOKS if h.target not in WITHOUT_PATCH})
)
def test_no_hook_is_installed_that_a_patch_replaces(name):
    assert os.environ["PREFIXSHARE_PATCHED"] in inspect.getfile(vllm)
    hooked = []
    if name != "vllm.platforms.cuda":  # imports CUDA's libraries
        hooked = hooked_functions(importlib.import_module(name))
        assert hooked == []
    for hook in registry.HOOKS:
        if hook.module == name and hook.install not in FILLING_LISTS:
            assert hook.is_replaced, hook.target


#: Hooks that look for their patch themselves: they fill a list of functions that it calls.
FILLING_LISTS = (
    selection.hook_backend_enum,
    selection.hook_engine_config,
    runners.hook_warm_up,
    *(hook.install for hook in activation.HOOKS),
    block_hashes.hook_block_hasher,
    copies.hook_decoder,
    copies.hook_encoder,
    copies.hook_new_request_data,
    tokenization.hook_tokenization,
)


def test_the_member_is_static():
    member = AttentionBackendEnum["PREFIX_SHARE"]
    assert "__reduce_ex__" not in vars(member)
    assert AttentionBackendEnum(member.value) is member
    assert member.get_class().get_name() == "PREFIX_SHARE"


def test_variables_are_known():
    from vllm import envs

    assert "VLLM_PREFIXSHARE_KERNEL" not in envs.environment_variables
    os.environ["VLLM_PREFIXSHARE_KERNEL"] = "auto"
    validate = getattr(envs, "validate_environ", None) or Platform.validate_environ
    try:
        validate(hard_fail=True)
        os.environ["VLLM_NOT_A_VARIABLE"] = "1"
        with pytest.raises(ValueError, match="VLLM_NOT_A_VARIABLE"):
            validate(hard_fail=True)
    finally:
        del os.environ["VLLM_PREFIXSHARE_KERNEL"], os.environ["VLLM_NOT_A_VARIABLE"]


class EndedError(Exception):
    """Ends a function of vLLM once the test has seen what it wanted."""


def test_the_check_is_registered_once():
    from vllm.engine.arg_utils import engine_config_checks

    register.register()
    assert engine_config_checks.count(selection.check_engine) == 1


def test_a_check_gets_the_arguments_and_who_asks(monkeypatch):
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    def check(*given: object) -> None:
        seen.append(given)
        raise EndedError

    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(arg_utils, "engine_config_checks", [check])
    engine_args = arg_utils.EngineArgs(model="none")
    for arguments in ({}, {"usage_context": UsageContext.LLM_CLASS}):
        with pytest.raises(EndedError):
            engine_args.create_engine_config(**arguments)
    assert seen == [(engine_args, None), (engine_args, UsageContext.LLM_CLASS)]


@pytest.mark.parametrize("context", ["LLM_CLASS", "OPENAI_API_SERVER"])
def test_a_finished_configuration_is_checked_as_without_patches(monkeypatch, context):
    seen: list[object] = []
    monkeypatch.setattr(selection, "check_platform", lambda: True)
    monkeypatch.setattr(selection.background_compilation, "start_planning", lambda: None)
    monkeypatch.setattr(
        selection, "_check_engine_config", lambda config, **given: seen.append((config, given))
    )
    engine_args = SimpleNamespace(
        attention_backend="PREFIX_SHARE",
        cudagraph_capture_sizes=[1, 2],
        compilation_config=None,
    )
    selection.check_engine(engine_args, SimpleNamespace(name=context))("finished")
    named = frozenset({"cudagraph_capture_sizes"})
    assert seen == [("finished", {"named": named, "offline": context == "LLM_CLASS"})]


def test_plugins_are_loaded_before_dictionaries_are_validated(monkeypatch):
    from vllm.engine import arg_utils

    order = []
    monkeypatch.setattr(arg_utils, "load_general_plugins", lambda: order.append("plugins"))
    monkeypatch.setattr(
        arg_utils, "AttentionConfig", lambda **given: order.append("validated") or given
    )
    arg_utils.EngineArgs(model="none", attention_config={"backend": "ANY"})
    assert order == ["plugins", "validated"]


def layer(**changes: object) -> AttentionSelectorConfig:
    given = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    return AttentionSelectorConfig(**{**given, **changes})


def test_a_layer_that_is_not_served_is_declined():
    ours = AttentionBackendEnum["PREFIX_SHARE"]
    assert Platform.backend_for_layer(ours, layer()) is ours
    assert Platform.backend_for_layer(ours, layer(has_sink=True)) is None
    assert Platform.backend_for_layer(None, layer(has_sink=True)) is None
    flash = AttentionBackendEnum.FLASH_ATTN
    assert Platform.backend_for_layer(flash, layer(has_sink=True)) is flash


def test_a_layer_is_not_declined_but_refused_where_strict(monkeypatch):
    monkeypatch.setenv("VLLM_PREFIXSHARE_STRICT", "1")
    ours = AttentionBackendEnum["PREFIX_SHARE"]
    assert Platform.backend_for_layer(ours, layer()) is ours
    with pytest.raises(PrefixShareError, match="attention sinks"):
        Platform.backend_for_layer(ours, layer(has_sink=True))


@pytest.mark.parametrize(
    ("own", "changes", "expected", "asked"),
    [
        ("FLASH_ATTN_MLA", {}, MLA_BACKEND, None),
        ("FLASHMLA", {"kv_cache_dtype": "fp8"}, FP8_MLA_BACKEND, None),
        ("TRITON_MLA", {}, None, None),
        ("FLASH_ATTN_MLA", {"use_sparse": True}, None, None),
        ("FLASH_ATTN", {"use_mla": False, "head_size": 64}, None, "PREFIX_SHARE"),
    ],
)
def test_an_mla_layer_extends_the_backend_that_the_platform_would_take(
    monkeypatch, own, changes, expected, asked
):
    """``expected``: path of our class; None for the platform's own choice."""
    member = AttentionBackendEnum[own]
    seen: list[object] = []

    class Hopper(Platform):
        device_type = "cpu"

        @classmethod
        def get_attn_backend_cls(cls, selected, attn_selector_config, num_heads=None):
            seen.append(getattr(selected, "name", None))
            return member.get_path()

    monkeypatch.setattr(vllm.platforms, "current_platform", Hopper())
    monkeypatch.setattr(fa_utils, "flash_attn_supports_mla", lambda: True)
    monkeypatch.setattr(flashmla, "is_flashmla_dense_supported", lambda: (True, None))
    monkeypatch.setattr(selector, "resolve_obj_by_qualname", lambda path: path)
    config = layer(**{"use_mla": True, "head_size": 576, **changes})
    choose = selector._cached_get_attn_backend.__wrapped__
    ours = SimpleNamespace(name="PREFIX_SHARE", get_class=lambda: PrefixShareCUDABackend)
    found = choose(ours, config)
    assert found == (expected or member.get_path())
    assert seen == [asked]
    if changes.get("use_mla", True):  # one of vLLM's is asked for as before
        assert choose(AttentionBackendEnum.TRITON_MLA, config) == member.get_path()
        assert seen[1:] == ["TRITON_MLA"]


def test_a_backend_declines_nothing_and_counts_nothing_by_default():
    assert AttentionBackend.decline_layer(layer()) is None
    assert AttentionBackend.choose_mla_class is None
    assert AttentionBackend.kv_layout_owner() is AttentionBackend
    assert not AttentionBackend.supports_cpu()
    assert AttentionBackend.take_stats() == {}
    assert ModelRunnerOutput(req_ids=[], req_id_to_index={}).attention_stats is None


def common(num_reqs: int, **fields: object) -> CommonAttentionMetadata:
    """A decode batch with one query in each row."""
    starts = torch.arange(num_reqs + 1, dtype=torch.int32)
    lens = torch.full((num_reqs,), 20, dtype=torch.int32)
    old = dict.fromkeys(("_seq_lens_cpu", "_num_computed_tokens_cpu"), lens)
    known = CommonAttentionMetadata.__dataclass_fields__
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu_upper_bound=lens,
        num_reqs=num_reqs,
        num_actual_tokens=num_reqs,
        max_query_len=1,
        max_seq_len=20,
        block_table_tensor=torch.zeros(num_reqs, 4, dtype=torch.int32),
        slot_mapping=torch.zeros(num_reqs, dtype=torch.int64),
        **{f: v for f, v in old.items() if f in known},
        **fields,
    )


TABLE = np.arange(24, dtype=np.int32).reshape(6, 4)
SLOTS = np.array([5, 0, 3])
SERIALS = np.array([7, 8, 9])


@pytest.mark.parametrize("by_slot", [False, True])
def test_the_table_stays_with_its_rows(by_slot):
    fields = {"req_idx": SLOTS, "req_serials": SERIALS} if by_slot else {}
    whole = common(3, block_table_cpu=TABLE, kv_cache_group_id=2, **fields)
    expected = TABLE[SLOTS] if by_slot else TABLE[:3]

    def blocks(part: CommonAttentionMetadata) -> np.ndarray:
        table = host_tables.HOST_TABLES.table_of(part)
        assert part.kv_cache_group_id == 2
        assert table.num_reqs(part.query_start_loc_cpu.numpy()) == part.num_reqs
        rows, serials = table.rows(part.num_reqs)
        assert (serials is None) == (not by_slot)
        return table.block_table[: part.num_reqs] if rows is None else table.block_table[rows]

    np.testing.assert_array_equal(blocks(whole), expected)
    np.testing.assert_array_equal(blocks(whole.unpadded(2, 2)), expected[:2])
    slices = [UBatchSlice(slice(i, j), slice(i, j)) for i, j in ((0, 1), (1, 3))]
    parts = split_attn_metadata(slices, whole)
    np.testing.assert_array_equal(np.concatenate([blocks(p) for p in parts]), expected)


def v2_tables(groups: int = 2) -> BlockTables:
    """The V2 runner's tables, without GPU memory."""
    tables = BlockTables.__new__(BlockTables)
    written: list[object] = []
    tables.num_kv_cache_groups = groups
    tables.blocks_per_kv_block = [2] + [1] * (groups - 1)  # vLLM up to 0.31 reads this field
    tables.num_blocks = SimpleNamespace(np=np.zeros((groups, 6), np.int32))
    device = SimpleNamespace(gpu=torch.zeros(6, 8), stage_write=lambda *args: written.append(args))
    tables.block_tables = [device] * groups
    tables.block_tables_cpu = tuple(np.zeros((6, 8), np.int32) for _ in range(groups))
    tables.req_serials = np.zeros(6, np.int64)
    tables._serials = iter(range(1, 100))
    tables.written = written
    return tables


def test_the_v2_runner_keeps_what_it_writes_to_the_device():
    tables = v2_tables()
    tables.append_block_ids(3, ([5, 6], [1]), overwrite=True)
    tables.append_block_ids(3, ([7], [2]), overwrite=False)
    tables.append_block_ids(0, ([5], [4]), overwrite=True)
    serials = tables.req_serials.copy()
    assert serials[0] > serials[3] > 0
    for group, host in enumerate(tables.block_tables_cpu):
        device = np.zeros_like(host)
        for row, start, ids in tables.written[group::2]:
            device[row, start : start + len(ids)] = ids
        np.testing.assert_array_equal(host, device)
        assert host[3].any()
    tables.append_block_ids(3, ([9], [9]), overwrite=True)
    assert tables.req_serials[3] > serials[0], "another request has the row"


def test_the_v2_runner_passes_the_table_on(monkeypatch):
    from vllm.v1.worker.gpu import attn_utils

    seen = []
    builder = SimpleNamespace(
        supports_update_block_table=False,
        build=lambda common_prefix_len, common_attn_metadata, **_: seen.append(
            common_attn_metadata
        ),
    )
    group = SimpleNamespace(
        get_metadata_builder=lambda ubatch_idx: builder,
        build_metadata=lambda metadata, ubatch_idx, **_: seen.append(metadata),
        layer_names=["layer"],
        kv_cache_spec=None,
    )
    given = common(3)
    arguments = {
        "attn_groups": [[], [group]],
        "num_reqs": 3,
        "num_tokens": 3,
        "query_start_loc_gpu": given.query_start_loc,
        "query_start_loc_cpu": given.query_start_loc_cpu,
        "max_query_len": 1,
        "seq_lens": given.seq_lens,
        "max_seq_len": 20,
        "block_tables": [given.block_table_tensor] * 2,
        "slot_mappings": torch.zeros(2, 3, dtype=torch.int64),
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[None, None]),
        "req_idx": SLOTS,
        "req_serials": SERIALS,
    }
    attn_utils.build_attn_metadata(**arguments, block_tables_cpu=(TABLE * 0, TABLE))
    attn_utils.build_attn_metadata(**arguments, block_tables_cpu=())
    attn_utils.build_attn_metadata(**arguments)
    real, dummy, unknown = seen
    assert real.kv_cache_group_id == 1
    assert real.block_table_cpu is TABLE
    np.testing.assert_array_equal(real.req_idx, SLOTS)
    assert host_tables.HOST_TABLES.table_of(dummy).num_reqs(np.arange(4)) == 0
    assert host_tables.HOST_TABLES.table_of(unknown) is None


def test_a_dummy_batch_has_no_blocks():
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    sizes = {"max_num_reqs": 4, "max_num_tokens": 8, "device": torch.device("cpu")}
    accepted = inspect.signature(InputBuffers.__init__).parameters
    buffers = InputBuffers(**{k: v for k, v in sizes.items() if k in accepted})
    assert InputBatch.make_dummy(2, 2, buffers).block_tables_cpu == ()


def test_builders_are_told_of_wake_up():
    from vllm.v1.worker.utils import tell_builders_of_wake_up

    told = []
    builder = SimpleNamespace(after_wake_up=told.append)
    group = SimpleNamespace(metadata_builders=[builder, builder])
    tell_builders_of_wake_up([[group], []], ["kv_cache"])
    assert told == [["kv_cache"]] * 2
    assert AttentionMetadataBuilder.after_wake_up(builder, None) is None


def test_the_context_of_a_warm_up_is_registered_once():
    from vllm.v1.worker.gpu_worker import warm_up_contexts

    register.register()
    assert warm_up_contexts == [warming_up]


def groups_of_builders(*takes: bool) -> list[list[SimpleNamespace]]:
    """Attention groups whose builders let graphs of decodes take tokens of prompts, or not."""
    builders = [SimpleNamespace(decode_graphs_take_prefills=lambda take=t: take) for t in takes]
    return [[SimpleNamespace(metadata_builders=[builder])] for builder in builders]


def test_builders_plan_for_prompts_in_graphs_unless_batch_invariant():
    assert AttentionMetadataBuilder.decode_graphs_take_prefills(None)
    for invariant in (False, True):
        builder = SimpleNamespace(planner=SimpleNamespace(is_invariant=invariant))
        assert PlanningBuilder.decode_graphs_take_prefills(builder) != invariant


@pytest.mark.parametrize("takes", [(True, True), (True, False)])
def test_no_graph_of_decodes_is_chosen_for_prompt_tokens_by_the_v1_runner(takes):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def chosen(computed: list[int], num_reqs: int = 2, **given: object) -> bool | None:
        def end(force_uniform_decode: bool | None, **_: object) -> None:
            seen.append(force_uniform_decode)
            raise EndedError

        seen: list[bool | None] = []
        batch = SimpleNamespace(
            num_computed_tokens_cpu=np.array(computed), num_prompt_tokens=np.array([40, 20])
        )
        runner = SimpleNamespace(
            attn_groups=groups_of_builders(*takes),
            input_batch=batch,
            uniform_decode_query_len=1,
            _is_uniform_decode=end,
        )
        with pytest.raises(EndedError):
            GPUModelRunner._determine_batch_execution_and_padding(
                runner, num_reqs, num_reqs, np.ones(num_reqs, np.int32), 1, False, **given
            )
        return seen[0]

    assert chosen([40, 30]) is None
    assert chosen([40, 19]) is (None if all(takes) else False)
    assert chosen([40, 19], 1) is None
    assert chosen([40, 19], force_uniform_decode=True) is True


@pytest.mark.parametrize("takes", [(True, True), (True, False)])
def test_no_graph_of_decodes_is_chosen_for_prompt_tokens_by_the_v2_runner(takes):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def chosen(computed: list[int], dummy_run: bool = False) -> int | None:
        states = SimpleNamespace(
            req_id_to_index={"a": 0, "b": 1},
            prefill_len=SimpleNamespace(np=np.array([40, 20])),
            num_computed_prefill_tokens=np.array(computed),
        )
        runner = SimpleNamespace(
            attn_groups=groups_of_builders(*takes),
            req_states=states,
            decode_query_len=1,
            adaptive_verification=None,
            pcp_manager=None,
            use_pp=False,
        )
        scheduled = SimpleNamespace(
            num_scheduled_tokens={"a": 1, "b": 1},
            total_num_scheduled_tokens=2,
            scheduled_spec_decode_tokens={},
        )
        return GPUModelRunner.gather_batch_req_state(runner, scheduled, dummy_run)[1]

    # vLLM 0.29 replays no such graph by itself
    by_itself = 1 if all(takes) and os.environ["PREFIXSHARE_PATCHED"] != "0.29.0" else None
    assert chosen([40, 20]) == 1
    assert chosen([40, 19]) == by_itself
    assert chosen([40, 19], dummy_run=True) == 1


def test_each_process_of_an_engine_activates_the_parts(monkeypatch):
    from vllm.plugins import engine_process_starts
    from vllm.v1.engine import core
    from vllm.v1.worker import worker_base

    assert core.engine_process_starts is worker_base.engine_process_starts is engine_process_starts
    assert len(engine_process_starts) == 1
    started = []
    monkeypatch.setattr(
        activation.metrics, "start_for_engine", lambda *arguments: started.append(arguments[-1])
    )

    class Config:
        def __init__(self, backend: str) -> None:
            self.attention_config = SimpleNamespace(backend=backend)

        def __getattr__(self, name: str) -> None:
            raise EndedError

    for backend in ("PREFIX_SHARE", "FLASH_ATTN"):
        with pytest.raises(EndedError):
            core.EngineCore(Config(backend), None, False)
        with pytest.raises(EndedError):
            worker_base.WorkerBase(Config(backend), 0, 0, "")
    assert started == [True, True, False, False]


@pytest.fixture(params=["off", "hashes", "detokenization,lookup,copies", "on", None])
def switched_on(request, monkeypatch):
    """Whether ``VLLM_PREFIXSHARE_PROMPTS`` leaves the parts of the patches on."""
    if request.param is None:
        monkeypatch.delenv(parts.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(parts.VARIABLE, request.param)
    settings.cache_clear()
    yield request.param not in ("off", "hashes")
    settings.cache_clear()


def test_the_decode_stream_follows_the_setting(monkeypatch, switched_on):
    from vllm.v1.engine import detokenizer

    seen: list[object] = []
    monkeypatch.setattr(
        detokenizer, "find_stream_start", lambda *given: seen.append(given) or whole
    )
    tokenizer = decoding.backend("byte level")
    whole = detokenizer.StreamStart([1, 2, 3], [])
    decoding.detokenizer(tokenizer, whole.ids, SamplingParams())
    assert bool(seen) == switched_on


def test_staged_writes_follow_the_setting(switched_on):
    contents = StagedContents(torch.int32)
    contents.extend(TokenIds([1, 2, 3]))
    assert isinstance(contents._parts[0], np.ndarray) == switched_on
    both = StagedContents(torch.int32)
    both.extend([0])
    both.extend(contents)
    assert (len(both), np.asarray(both).tolist()) == (4, [0, 1, 2, 3])


def test_functions_of_the_parts_are_registered_once():
    from vllm.renderers.base import text_tokenizers
    from vllm.v1.core.kv_cache_utils import block_hasher_wrappers
    from vllm.v1.core.sched.output import new_request_preparers
    from vllm.v1.serial_utils import message_packers, message_unpackers

    register.register()
    for module in {hook.module for hook in (*copies.HOOKS, *block_hashes.HOOKS)}:
        importlib.import_module(module)
    assert block_hasher_wrappers == [SharedBlockHasher]
    for entries in (text_tokenizers, new_request_preparers, message_packers, message_unpackers):
        assert len(entries) == 1


@functools.cache
def unpatched(name: str) -> ModuleType:
    """A module of the release that was patched, under another name."""
    path = Path(os.environ["PREFIXSHARE_UNPATCHED"], *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"{name}_unpatched", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: Functions that the patch of the look-up rewrites: module, class and function.
LOOKUP = (
    ("vllm.v1.core.block_pool", "BlockPool", "touch"),
    ("vllm.v1.core.block_pool", "BlockPool", "free_blocks"),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager",
        "find_longest_cache_hit",
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager",
        "_get_num_evictable_blocks",
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "estimate_cached_tokens"),
)
DETOKENIZER = ("vllm.v1.engine.detokenizer", "FastIncrementalDetokenizer")


@pytest.fixture
def rewritten_while_active(monkeypatch):
    """The code of a part is the released one unless `cases.active` names the part."""

    @contextmanager
    def active(*names: str) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if "lookup" not in names:
                for module, owner, function in LOOKUP:
                    released = vars(getattr(unpatched(module), owner))[function]
                    patched = getattr(importlib.import_module(module), owner)
                    patch.setattr(patched, function, released)
            if "detokenization" not in names:
                module, name = DETOKENIZER
                patch.setattr(decoding, name, getattr(unpatched(module), name))
            yield

    monkeypatch.setattr(cases, "active", active)
    monkeypatch.setattr(decoding, "active", active)


@pytest.mark.parametrize("seed", range(20))
def test_the_patched_look_up_leaves_a_cache_as_the_released_one(rewritten_while_active, seed):
    twins = cases.Twins(Random(seed), cases.algorithm("sha256"))
    for _ in range(40):
        twins.step()
        twins.check()


def test_the_look_up_follows_the_setting(rewritten_while_active, monkeypatch, switched_on):
    twins = cases.Twins(Random(1), cases.algorithm("sha256"))
    probed: list[object] = []
    inline = BlockPool.get_leading_cached_blocks
    monkeypatch.setattr(
        BlockPool,
        "get_leading_cached_blocks",
        lambda *given: probed.append(given) or inline(*given),
    )
    for _ in range(40):
        twins.step()
        twins.check()
    assert bool(probed) == switched_on


@pytest.mark.parametrize("name", decoding.KINDS)
def test_the_patched_decode_stream_returns_the_text_of_the_released_one(
    rewritten_while_active, name
):
    decoding.compare(Random(name), decoding.backend(name), cases=30)


def test_the_patched_decode_stream_starts_from_a_tail():
    from vllm.tokenizers.detokenizer_utils import find_stream_start

    tokenizer = decoding.backend("byte level")
    prompt = tokenizer.encode("The quick brown fox, and so on. " * 50).ids
    start = find_stream_start(tokenizer, prompt, True)
    assert start == detokenization._find_start(tokenizer, prompt, True)
    assert len(start.ids) <= 8
    assert start.ids == prompt[-len(start.ids) :]
