"""Estimates of a whole call: host work on the prompts, prefill and decode."""

import numpy as np

from vllm_prefixshare.cli.decode_groups import DecodeGroup
from vllm_prefixshare.cli.estimated_model import EstimatedModel
from vllm_prefixshare.core import FloatArray
from vllm_prefixshare.settings import PROMPT_PARTS

#: Entries of times: vLLM as it is, and PREFIX_SHARE with the parts of shared host work off and on.
SIDES = ("vllm", "parts_off", "parts_on")
#: Parts that take as long as vLLM's own code for text that is new. The others never walk a prompt.
PER_TEXT = ("tokenization", "hashes")


#: Part of the host work -> microseconds per prompt token in vLLM's own code, and the same where the
#: part is active and the token is known. Of a request with 34,400 prompt tokens, in milliseconds:
#: tokenization 87.5 (64 to 111) and 0.3, detokenization 20 and 0.01, hashes 3.9 and 0.17, look-up
#: 1.58 and 0.33, copies 2.58 and 0.51.
NEW_US = {
    "tokenization": 2.54,
    "detokenization": 0.58,
    "hashes": 0.113,
    "lookup": 0.046,
    "copies": 0.075,
}
SHARED_US = {
    "tokenization": 0.0087,
    "detokenization": 0.0003,
    "hashes": 0.005,
    "lookup": 0.0096,
    "copies": 0.0148,
}
SOURCE = "host work of 34k-token prompts on one CPU, vLLM 0.33, HF tokenizers"
#: Of the GPU's dense bfloat16 arithmetic, and of its memory bandwidth in a decode step: on an H100
#: a document of 34,400 tokens takes an 8B model 1.14 s, and a step of 64 requests 9.4 ms.
PREFILL_EFFICIENCY, WEIGHTS_EFFICIENCY = 0.75, 0.8


def call_times(
    group: DecodeGroup,
    output_tokens: int,
    attention_us: tuple[float, float],
    model: EstimatedModel,
) -> dict[str, FloatArray]:
    """Where the time of a group goes, one thing after the other: milliseconds of ``SIDES``.

    Args:
        output_tokens: steps, in each of which all requests decode.
        attention_us: of all layers in a decode step, without and with sharing.
        model: if it has no weights, only host work is estimated.
    """
    times = {}
    for part in PROMPT_PARTS:
        off = group.prompt_tokens * NEW_US[part] / 1e3
        new = group.new_tokens if part in PER_TEXT else 0
        known = group.prompt_tokens - new
        on = (known * SHARED_US[part] + new * NEW_US[part]) / 1e3
        times[part] = np.array([off, off, min(on, off)])
    if num_bytes := model.memory.weights:
        arithmetic = model.gpu.tflops * 1e6 * PREFILL_EFFICIENCY  # operations per microsecond
        # two operations for each weight of two bytes
        flops = group.new_tokens * num_bytes + group.attended * model.attention_flops
        times["prefill"] = np.full(3, flops / arithmetic / 1e3)
        # a step reads the weights once, and multiplies them with a row of each request
        weights_us = max(
            num_bytes / (model.gpu.gb_per_s * 1e3 * WEIGHTS_EFFICIENCY),
            num_bytes * len(group.batch.seq_lens) / arithmetic,
        )
        unshared_us, shared_us = attention_us
        step_us = weights_us + np.array([unshared_us, shared_us, shared_us])
        times["decode"] = output_tokens / 1e3 * step_us
    times["sum"] = sum(times.values(), np.zeros(3))
    return times
