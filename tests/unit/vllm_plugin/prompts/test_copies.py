"""Ids as arrays between processes and to the GPU: what arrives is what vLLM's own code delivers."""

import copy
import os
import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils import torch_utils
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.gpu import buffer_utils

from tests.support.shared_prefixes import install_hook
from vllm_prefixshare.vllm_plugin.hooks import copies as hooks
from vllm_prefixshare.vllm_plugin.prompts import bounded_cache, copies, parts
from vllm_prefixshare.vllm_plugin.prompts.copies import (
    MIN_BLOCK_IDS,
    MIN_TOKEN_IDS,
    MessageIds,
    RecentIds,
    StagedIds,
)
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds
from vllm_prefixshare.vllm_plugin.step import host_tables

LONG = 5 * MIN_TOKEN_IDS
LENGTHS = (0, 1, MIN_TOKEN_IDS - 1, MIN_TOKEN_IDS, LONG, 70_000)


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    for hook in hooks.HOOKS:
        install_hook(hook)
    monkeypatch.setattr(parts, "_active", frozenset())
    monkeypatch.setattr(parts, "_reported", set())
    monkeypatch.setattr(copies, "_recent", None)
    monkeypatch.setitem(parts.COUNTERS, copies.PART, parts.PartCounters())


@pytest.fixture
def switch(monkeypatch):
    """Switch the part on or off in this process."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(parts, "_active", frozenset({copies.PART} if on else ()))

    switch(True)
    return switch


def random_ids(num_ids: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 200_000, num_ids).tolist()


def core_request(ids: list[int] | None, **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        **{
            "request_id": "cmpl-1",
            "prompt_token_ids": ids,
            "mm_features": None,
            "sampling_params": SamplingParams(max_tokens=5),
            "pooling_params": None,
            "arrival_time": 1.5,
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
            **fields,
        }
    )


def encoded(request: EngineCoreRequest) -> list[bytes]:
    return [bytes(buffer) for buffer in MsgpackEncoder().encode(request)]


def decoded(message: list[bytes]) -> EngineCoreRequest:
    return MsgpackDecoder(EngineCoreRequest).decode(message)


def image(offset: int) -> MultiModalFeatureSpec:
    position = PlaceholderRange(offset=offset, length=4)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier="cat", mm_position=position
    )


FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "short request id": {"request_id": ""},
    "longer request id": {"request_id": "r" * 40},
    "longest request id": {"request_id": "ü" * 400},
    "salt": {"cache_salt": "tenant"},
    "LoRA": {"lora_request": LoRARequest("a", 1, "/adapter")},
    "images": {"mm_features": [image(3), image(900)]},
    "embeddings": {"prompt_embeds": torch.ones(600, 8), "prompt_is_token_ids": [True] * 600},
    "trace": {"trace_headers": {"traceparent": "00-1"}, "priority": 3, "external_req_id": "x"},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
@pytest.mark.parametrize("num_ids", LENGTHS)
@pytest.mark.parametrize("kind", [list, TokenIds])
def test_a_request_arrives_whichever_side_has_the_part(switch, fields, num_ids, kind):
    ids = random_ids(num_ids)
    request = core_request(kind(ids), **fields)
    switch(False)
    theirs = decoded(encoded(core_request(ids, **fields)))
    for sender in (True, False):
        for receiver in (True, False):
            switch(sender)
            message = encoded(request)
            assert type(request.prompt_token_ids) is kind
            switch(receiver)
            got = decoded(message)
            shares = sender and receiver and num_ids >= MIN_TOKEN_IDS
            assert type(got.prompt_token_ids) is (MessageIds if shares else list)
            for field in EngineCoreRequest.__struct_fields__:
                ours, expected = getattr(got, field), getattr(theirs, field)
                if field in ("request_id", "prompt_token_ids"):
                    assert ours == expected
                elif isinstance(expected, torch.Tensor):
                    assert torch.equal(ours, expected)
                else:
                    assert str(ours) == str(expected)


def test_the_message_is_plain_messagepack(switch):
    ids = TokenIds(random_ids(LONG))
    fields = msgspec.msgpack.decode(encoded(core_request(ids))[0])
    assert fields[1] == ids


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**70, 1.5, "a", None])
def test_ids_that_are_no_32_bit_integers_are_vllms(switch, bad):
    ids = [*random_ids(LONG), bad]
    got, theirs = [], []
    for results, on in ((got, True), (theirs, False)):
        switch(on)
        for kind in (list, TokenIds):
            try:
                results.append(decoded(encoded(core_request(kind(ids)))).prompt_token_ids)
            except Exception as e:
                results.append(type(e))
    assert got == theirs
    assert parts.COUNTERS[copies.PART].fallbacks == 2


def test_a_mutated_prompt_is_sent_as_it_is_now(switch):
    ids = TokenIds(random_ids(LONG))
    assert len(ids.array) == LONG
    ids[3] = 7
    ids.append(8)
    assert decoded(encoded(core_request(ids))).prompt_token_ids == list(ids)


@given(data=st.data())
def test_no_other_message_is_taken_for_ours(data):
    message = bytearray(encoded_ids := b"\x92\xa1r" + _raw(list(range(40))))
    position = data.draw(st.integers(0, len(message) - 1))
    message[position] = data.draw(st.integers(0, 255))
    cut = bytes(message[: data.draw(st.integers(0, len(encoded_ids)))])
    split = copies.split_message(cut)
    if split is not None:
        first, ids = msgspec.msgpack.decode(cut)
        assert split.array.tolist() == ids
        assert msgspec.msgpack.decode(split.rest) == [first, None]


def _raw(ids: list[int]) -> bytes:
    raw = copies.encode_ids(ids)
    assert raw is not None
    return bytes(raw)


@given(data=st.binary(max_size=40))
def test_arbitrary_bytes_are_no_error(data):
    copies.split_message(data)


def test_the_second_request_on_a_document_shares_its_integers(switch):
    document = random_ids(LONG)
    first = decoded(encoded(core_request(TokenIds([*document, 1000, 2000]))))
    second = decoded(encoded(core_request(TokenIds([*document, 3000]))))
    third = decoded(encoded(core_request(TokenIds(document[:2000]))))
    assert second.prompt_token_ids == [*document, 3000]
    assert third.prompt_token_ids == document[:2000]
    pairs = zip(first.prompt_token_ids[:LONG], second.prompt_token_ids, strict=False)
    assert all(a is b for a, b in pairs)
    counters = parts.COUNTERS[copies.PART]
    # Each request counts on both sides of the wire, where the sender has an array of all.
    sent = LONG + 2 + LONG + 1 + 2000
    assert counters.units == 2 * sent
    assert counters.shared_units == sent + LONG + 2000
    assert counters.cache_bytes == copies.recent_ids().num_bytes > 0


def test_an_array_on_the_wire_is_no_larger_than_twice_the_list(switch):
    ids = TokenIds(random_ids(34_000))
    with_part = sum(map(len, encoded(core_request(ids))))
    switch(False)
    assert with_part < 2 * sum(map(len, encoded(core_request(ids))))


# ---- lists of recent ids ------------------------------------------------------------------------


@given(data=st.data())
def test_recent_lists_are_exact_and_bounded(data):
    recent = RecentIds(max_bytes=44 * 2000)
    documents = [random_ids(data.draw(st.integers(0, 900)), seed) for seed in range(3)]
    for _ in range(8):
        ids = list(data.draw(st.sampled_from(documents)))
        del ids[data.draw(st.integers(0, len(ids))) :]
        ids += random_ids(data.draw(st.integers(0, 30)), 9)
        shared = recent.ids(np.array(ids, np.int32))
        assert shared.ids == ids
        assert shared.ids.array.tolist() == ids
        assert 0 <= shared.num_shared <= len(ids)
        shared.ids.append(-1)  # the caller owns it
        if shared.ids[:-1]:
            shared.ids[0] = -2
        assert recent.num_bytes <= 44 * 2000


def test_a_prompt_above_the_bound_is_not_kept():
    recent = RecentIds(max_bytes=44 * 100)
    array = np.arange(101, dtype=np.int32)
    assert recent.ids(array).ids == list(range(101))
    assert recent.ids(array).num_shared == 0
    assert recent.num_bytes == 0


def test_the_process_bound_is_an_eighth_of_the_setting(monkeypatch):
    monkeypatch.setattr(bounded_cache, "settings", lambda: SimpleNamespace(prompts_cache_mib=44))
    assert sum(bounded_cache.SHARES.values()) == 32
    recent = copies.recent_ids()
    for seed in range(9):
        recent.ids(np.array(random_ids(40_000, seed), np.int32))
    assert 4 << 20 < recent.num_bytes <= (44 << 20) // 8


@pytest.mark.parametrize("num_ids", LENGTHS)
def test_message_ids_survive_pickle_and_copies(num_ids):
    ids = random_ids(num_ids)
    sent = MessageIds(ids, np.array(ids, np.int32))
    for received in (pickle.loads(pickle.dumps(sent)), copy.deepcopy(sent), copy.copy(sent)):
        assert received == ids
        assert type(received) is MessageIds
        assert received.array.tolist() == ids
    assert len(pickle.dumps(sent)) < 4 * num_ids + 200
    sent.append(2**40)
    assert pickle.loads(pickle.dumps(sent)) == [*ids, 2**40]
    assert type(sent[:2]) is list


# ---- the scheduler's message to the workers -----------------------------------------------------


def engine_request(ids: list[int], **fields: Any) -> Request:
    return Request("r", ids, SamplingParams(max_tokens=9), None, **fields)


def new_request(request: Request, block_ids: tuple[list[int], ...], v2: bool) -> NewRequestData:
    all_ids = (request._all_token_ids,) if v2 else ()
    return NewRequestData.from_request(request, block_ids, *all_ids)


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("num_output", [0, 1, 40])
@pytest.mark.parametrize("num_ids", [1, MIN_TOKEN_IDS, LONG])
@pytest.mark.parametrize("kind", [list, TokenIds])
def test_workers_get_what_vllm_sends(switch, kind, num_ids, num_output, v2):
    ids = random_ids(num_ids)
    output = random_ids(num_output, 1)
    blocks = (random_ids(MIN_BLOCK_IDS, 2), [], random_ids(3, 3))
    results = []
    for on in (True, False):
        switch(on)
        request = engine_request(kind(ids))
        request.append_output_token_ids(output)
        data = new_request(request, copy.deepcopy(blocks), v2)
        results.append(data)
        results.append(pickle.loads(pickle.dumps(data)))
    ours, received, theirs, _ = results
    assert str(ours) == str(received) == str(theirs)
    assert ours.block_ids == theirs.block_ids == blocks
    assert type(ours.block_ids[0]) is MessageIds
    assert [type(group) for group in ours.block_ids[1:]] == [list, list]
    assert (ours.prefill_token_ids is None) == (not v2)
    if v2 and kind is TokenIds and num_ids >= MIN_TOKEN_IDS:
        assert ours.prefill_token_ids.array.tolist() == ids + output


def test_ids_of_embeddings_are_not_the_prompts(switch):
    ids = TokenIds(random_ids(LONG))
    mask = [True] * (LONG - 1) + [False]
    embeds = torch.zeros(LONG, 2)
    request = engine_request(ids, prompt_embeds=embeds, prompt_is_token_ids=mask)
    data = new_request(request, ([],), v2=True)
    assert data.prefill_token_ids == [*ids[:-1], 0]
    assert data.prompt_token_ids == ids


def test_a_message_to_the_workers_carries_a_prompt_once(switch):
    ids = random_ids(34_000)
    blocks = (random_ids(2150, 1),)
    sizes = []
    for on in (True, False):
        switch(on)
        data = new_request(engine_request(MessageIds(ids)), blocks, v2=True)
        sizes.append(len(pickle.dumps(data)))
    assert sizes[0] < 4 * (34_000 + 2150) + 3000
    assert sizes[0] < 0.7 * sizes[1]


@pytest.mark.parametrize("blocks_per_id", [1, 4])
def test_the_hosts_block_table_takes_arrays(blocks_per_id):
    ids = random_ids(300)
    tables = []
    for block_ids in (ids, MessageIds(ids)):
        table = host_tables.SlotTable(host_tables.Slots(2), (2, 4000), blocks_per_id)
        table.append(1, block_ids, overwrite=True)
        table.append(1, [5, 6], overwrite=False)
        tables.append(table.block_table)
    assert np.array_equal(*tables)
    assert tables[0][1].any()


# ---- staged writes of the V2 runner -------------------------------------------------------------


class _Buffer:
    """``UvaBuffer`` without pinned memory, which needs a GPU."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        return self.cpu if n is None else self.cpu[:n]


class _AttributeBuffer(_Buffer):
    """vLLM 0.29 has an attribute in place of the method."""

    uva = property(lambda self: self.cpu)


class _WriteKernel:
    """The Triton kernel, in Python."""

    def __getitem__(self, grid: Any) -> Any:
        return self.write

    def write(
        self,
        output: Any,
        strides: Any,
        indices: torch.Tensor,
        starts: torch.Tensor,
        contents: torch.Tensor,
        cu_lens: torch.Tensor,
        group_ids: torch.Tensor | None,
        **_: Any,
    ) -> None:
        begin = 0
        for i, (row, start, end) in enumerate(zip(indices, starts, cu_lens, strict=True)):
            table = output if group_ids is None else output[group_ids[i]]
            table[row, start : start + end - begin] = contents[begin:end]
            begin = end


@pytest.fixture
def without_gpu(monkeypatch):
    has_method = hasattr(buffer_utils.UvaBuffer, "uva")
    monkeypatch.setattr(buffer_utils, "UvaBuffer", _Buffer if has_method else _AttributeBuffer)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: True)
    monkeypatch.setattr(buffer_utils, "_apply_write_kernel", _WriteKernel())
    monkeypatch.setattr(torch_utils, "PIN_MEMORY", False)


def staged(uva: bool) -> Any:
    return buffer_utils.StagedWriteTensor(
        (8, 400), torch.int32, torch.device("cpu"), uva_instead_of_gpu=uva
    )


def random_writes(rng: np.random.Generator) -> list[tuple[int, int, list[int]]]:
    return [
        (int(rng.integers(8)), int(rng.integers(100)), rng.integers(0, 999, length).tolist())
        for length in rng.integers(0, 300, rng.integers(0, 6))
    ]


#: The contents of a vLLM whose staged writes keep arrays.
PATCHED_CONTENTS = getattr(buffer_utils, "StagedContents", None)
KINDS = (list, tuple, TokenIds, lambda ids: TokenIds(ids, np.array(ids, np.int32)), iter)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("uva", [True, False])
def test_staged_writes_are_vllms(switch, without_gpu, uva, seed):
    rng = np.random.default_rng(seed)
    ours = staged(uva)
    switch(False)
    theirs = staged(uva)
    assert type(ours._staged_write_contents) is (PATCHED_CONTENTS or StagedIds)
    assert type(theirs._staged_write_contents) is (PATCHED_CONTENTS or list)
    for _ in range(4):
        for row, start, ids in random_writes(rng):
            kind = KINDS[rng.integers(len(KINDS) - (not ids))]
            ours.stage_write(row, start, kind(ids))
            theirs.stage_write(row, start, ids)
        if rng.random() < 0.5:
            ours.stage_write_elem(3, 5)
            theirs.stage_write_elem(3, 5)
        contents = np.asarray(ours._staged_write_contents)
        np.testing.assert_array_equal(contents, np.asarray(theirs._staged_write_contents))
        ours.apply_write()
        theirs.apply_write()
        assert torch.equal(ours.gpu, theirs.gpu)
        assert len(ours._staged_write_contents) == 0


@pytest.mark.parametrize("seed", range(10))
def test_staged_writes_of_several_groups_are_vllms(switch, without_gpu, seed):
    rng = np.random.default_rng(seed)
    ours = [staged(False) for _ in range(3)]
    switch(False)
    theirs = [staged(False) for _ in range(3)]
    device = torch.device("cpu")
    for _ in range(3):
        for group in range(3):
            for row, start, ids in random_writes(rng):
                ours[group].stage_write(row, start, TokenIds(ids))
                theirs[group].stage_write(row, start, ids)
        for tables in (ours, theirs):
            writer = buffer_utils.FusedStagedWriter(device, 24)
            writer.apply(tables, [table.gpu for table in tables], None)
        for table, their_table in zip(ours, theirs, strict=True):
            assert torch.equal(table.gpu, their_table.gpu)


def test_an_array_is_staged_as_it_was(switch, without_gpu):
    table = staged(False)
    ids = TokenIds([1, 2, 3])
    table.stage_write(0, 0, ids)
    ids[0] = 9
    ids.append(4)
    table.apply_write()
    assert table.gpu[0, :4].tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_other_tensors_collect_lists(switch, without_gpu, dtype):
    table = buffer_utils.StagedWriteTensor((2, 4), dtype, torch.device("cpu"))
    row = buffer_utils.StagedWriteTensor(4, torch.int32, torch.device("cpu"))
    kind = PATCHED_CONTENTS or list
    assert type(table._staged_write_contents) is type(row._staged_write_contents) is kind


# ---- a vLLM with other code ---------------------------------------------------------------------


class _OtherRequest(msgspec.Struct, array_like=True):
    prompt_token_ids: list[int]
    request_id: str


def test_an_unknown_form_of_requests_is_left_to_vllm(switch):
    _OtherRequest.__name__ = "EngineCoreRequest"
    request = _OtherRequest(random_ids(LONG), "r")
    message = [bytes(buffer) for buffer in MsgpackEncoder().encode(request)]
    assert MsgpackDecoder(_OtherRequest).decode(message) == request
    assert type(MsgpackDecoder(_OtherRequest).decode(message).prompt_token_ids) is list
    assert len(parts._reported) == 1


def test_other_messages_are_vllms(switch):
    message = [bytes(buffer) for buffer in MsgpackEncoder().encode(["a", random_ids(LONG)])]
    assert MsgpackDecoder().decode(message) == ["a", random_ids(LONG)]
    assert MsgpackDecoder().decode(message[0]) == ["a", random_ids(LONG)]
    assert parts.COUNTERS[copies.PART].requests == 0


def test_this_is_the_release_that_was_asked_for():
    import vllm

    expected = os.environ.get("PREFIXSHARE_EXPECT_VLLM")
    assert expected is None or expected == vllm.__version__
