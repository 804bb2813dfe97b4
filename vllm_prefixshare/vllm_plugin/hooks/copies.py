"""Token ids and block ids as arrays: on the wire to the engine core, in the messages to the workers
and in the staged writes of the V2 model runner.
"""

from copy import copy
from types import ModuleType
from typing import Any

import numpy as np

from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, Hook, after, extend, wrap
from vllm_prefixshare.vllm_plugin.prompts import copies
from vllm_prefixshare.vllm_plugin.prompts.copies import PART, StagedIds
from vllm_prefixshare.vllm_plugin.prompts.parts import is_enabled, measured, report_once
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds

_FIRST_FIELDS = ("request_id", "prompt_token_ids")


def hook_encoder(module: ModuleType) -> None:
    """Encode the token ids of a request from their array."""
    if extend(module, "message_packers", _packed):
        return

    def wrapper(original: Function) -> Function:
        def encode(self: Any, obj: Any) -> Any:
            return original(self, _packed(obj))

        return encode

    wrap(module.MsgpackEncoder, "encode", wrapper)


def _packed(obj: Any) -> Any:
    """A request with its ids encoded, or ``obj`` where vLLM has to encode it."""
    if not is_enabled(PART) or not _is_long_request(obj):
        return obj
    with measured(PART) as counters:
        ids = obj.prompt_token_ids
        counters.units += len(ids)
        encoded = copies.encode_ids(ids)
        if encoded is None:
            counters.fallbacks += 1
            return obj
        if isinstance(ids, TokenIds):
            counters.shared_units += len(ids)
        message = copy(obj)
        message.prompt_token_ids = encoded
        return message


def _is_long_request(obj: Any) -> bool:
    if not _is_request_type(type(obj)):
        return False
    ids = obj.prompt_token_ids
    return isinstance(ids, list) and len(ids) >= copies.MIN_TOKEN_IDS


def _is_request_type(request_type: Any) -> bool:
    """Whether this is ``EngineCoreRequest``, encoded as an array of the request's id, its token
    ids and the other fields.
    """
    # By name: a process may encode other messages before it can import the engine.
    if getattr(request_type, "__name__", None) != "EngineCoreRequest":
        return False
    fields = request_type.__struct_fields__
    if request_type.__struct_config__.array_like and fields[:2] == _FIRST_FIELDS:
        return True
    report_once(PART, "the form of EngineCoreRequest is not known")
    return False


def hook_decoder(module: ModuleType) -> None:
    """Take the token ids of a request out of its message, and share the integers of a recent
    prompt.
    """
    if extend(module, "message_unpackers", _unpacked):
        return

    def wrapper(original: Function) -> Function:
        def decode(self: Any, bufs: Any) -> Any:
            request = _unpacked(self, bufs)
            return original(self, bufs) if request is None else request

        return decode

    wrap(module.MsgpackDecoder, "decode", wrapper)


def _unpacked(decoder: Any, bufs: Any) -> Any:
    """The request in a message with ids that `_packed` encoded, or None for any other message."""
    if (
        not is_enabled(PART)
        or not isinstance(bufs, list | tuple)
        or not _is_request_type(decoder.decoder.type)
    ):
        return None
    message = copies.split_message(bufs[0])
    if message is None:
        return None
    with measured(PART) as counters:
        recent = copies.recent_ids()
        # A message without ids: vLLM decodes it.
        request = decoder.decode([message.rest, *bufs[1:]])
        shared = recent.ids(message.array)
        request.prompt_token_ids = shared.ids
        counters.units += len(shared.ids)
        counters.shared_units += shared.num_shared
        counters.cache_bytes = recent.num_bytes
        return request


def hook_new_request_data(module: ModuleType) -> None:
    """Give the workers the ids of a new request with their arrays."""
    if extend(module, "new_request_preparers", _add_arrays):
        return

    def wrapper(original: Function) -> Function:
        def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            data = original(cls, request, *args, **kwargs)
            _add_arrays(data)
            return data

        return from_request

    wrap(module.NewRequestData, "from_request", wrapper)


def _add_arrays(data: Any) -> None:
    """Replace the lists of a ``NewRequestData`` by lists that carry arrays."""
    if is_enabled(PART):
        data.block_ids = tuple(copies.with_array(ids) for ids in data.block_ids)
        if data.prefill_token_ids is not None:
            data.prefill_token_ids = copies.all_ids_with_array(
                data.prefill_token_ids, data.prompt_token_ids
            )


def hook_staged_writes(module: ModuleType) -> None:
    """Collect the staged writes of rows of int32 as arrays."""
    import torch  # not before vLLM does

    def collect(staged: Any) -> None:
        if not is_enabled(PART) or staged.dtype != torch.int32 or staged.gpu.ndim != 2:
            return
        if type(getattr(staged, "_staged_write_contents", None)) is not list:
            report_once(PART, "the contents of StagedWriteTensor are not a list")
            return
        staged._staged_write_contents = StagedIds()

    def wrapper(original: Function) -> Function:
        def async_tensor_h2d(data: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(data, StagedIds):
                data = np.asarray(data)
            return original(data, *args, **kwargs)

        return async_tensor_h2d

    wrap(module, "async_tensor_h2d", wrapper)
    wrap(module.StagedWriteTensor, "__init__", after(collect))


HOOKS = (
    Hook(
        "vllm.v1.serial_utils",
        "MsgpackEncoder.encode",
        "a prompt's token ids are encoded one by one, though the tokenizer gave an array",
        "EngineCoreRequest carries token ids as an array",
        hook_encoder,
        parts=("copies",),
    ),
    Hook(
        "vllm.v1.serial_utils",
        "MsgpackDecoder.decode",
        "the engine core creates the integers of a shared prompt again for each request, and its "
        "main thread waits for them",
        "EngineCoreRequest carries token ids as an array",
        hook_decoder,
        parts=("copies",),
    ),
    Hook(
        "vllm.v1.core.sched.output",
        "NewRequestData.from_request",
        "workers receive a prompt's ids twice and flatten lists of token ids and block ids",
        "NewRequestData carries arrays",
        hook_new_request_data,
        parts=("copies",),
    ),
    Hook(
        "vllm.v1.worker.gpu.buffer_utils",
        "StagedWriteTensor.__init__",
        "the V2 model runner flattens token ids and block ids integer by integer",
        "StagedWriteTensor takes arrays",
        hook_staged_writes,
        parts=("copies",),
        switch="vllm.v1.worker.gpu.buffer_utils:StagedContents.keeps_arrays",
    ),
)
