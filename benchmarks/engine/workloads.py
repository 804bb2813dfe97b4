"""The workloads of ``benchmarks.engine``: shared documents, samples, and two recordings.

All tokens are random, from fixed seeds; the workload decides which requests share them. Lengths are
in tokens.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.prompt_trees import shared_documents
from tests.support.engine import Batch
from vllm_prefixshare import PrefixShareError

#: Tokens of one hash id in the Mooncake trace.
MOONCAKE_BLOCK = 512


#: The last three share nothing: each request has its own document, cached beforehand so that a
#: repeat costs no prefill.
FIXED = {
    "doc32k": shared_documents("64 requests on one 32k document", 1, 64, 32768, 64),
    "docs8k": shared_documents("8 documents x 16 requests, 8k each", 8, 16, 8192, 64),
    "samples": shared_documents("4 prompts x 64 samples, 2k + 512", 4, 64, 2048, 512),
    "doc4k": shared_documents("128 requests on one 4k document", 1, 128, 4096, 64),
    "doc16k": shared_documents("32 requests on one 16k document", 1, 32, 16384, 64),
    "unshared": shared_documents("nothing shared, 128 x 2k", 128, 1, 1984, 64),
    "few": shared_documents("nothing shared, 8 x 8k", 8, 1, 8128, 64),
    "single": shared_documents("one request, 8k", 1, 1, 8128, 64),
}
#: short questions on a cached document, of which one step gives the only token
QUESTIONS = {
    "questions32k": shared_documents("128 questions of 8 tokens on 32k", 1, 128, 32768, 8),
    "questions4k": shared_documents("128 questions of 8 tokens on 4k", 1, 128, 4096, 8),
}
#: one document of growing length, up to the 120k tokens of FlashForge's sweep (section 6.1); the
#: longer ones need a larger --max-model-len
SWEEP = {
    f"sweep{n}k": shared_documents(f"32 requests on one {n}k document", 1, 32, n << 10, 64)
    for n in (8, 32, 64, 120)
}
#: DeFT's few-shot prompting (table 5), with 400 output tokens
FEW_SHOT = {
    f"fewshot{n}": shared_documents(f"few-shot, {n} samples of one 4k prompt", 1, n, 4000, 1)
    for n in (20, 30, 50)
}
#: prompts and their tokens; each is sampled ``GRPO_SAMPLES`` times
GRPO = shared_documents("GRPO, 32 prompts x 16 samples, 1k", 32, 16, 1024, 0)
GRPO_SAMPLES = 16


def kv_bytes_per_token(config: dict[str, Any], bytes_per_number: int = 2) -> int:
    """Bytes per token in all layers and ranks. config: the model's ``config.json``. Layers of
    linear attention have no KV; those with latents have one for all heads.
    """
    layers = config["num_hidden_layers"] // config.get("full_attention_interval", 1)
    if rank := config.get("kv_lora_rank"):
        return layers * (rank + config["qk_rope_head_dim"]) * bytes_per_number
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * layers * kv_heads * head_dim * bytes_per_number


def has_experts(config: dict[str, Any]) -> bool:
    """Whether a model's layers have several experts. config: the model's ``config.json``."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return any((config.get(name) or 0) > 1 for name in names)


@dataclass(frozen=True, slots=True)
class Requests:
    """A batch of unequal requests: prompts and the lengths of their answers."""

    prompts: list[list[int]]
    max_tokens: list[int]


def mooncake(path: Path, count: int, limit: int, longest_answer: int, vocab: int) -> Requests:
    """The first ``count`` requests of a Mooncake trace that fit into ``limit`` tokens.

    Requests with the same leading hash ids begin with the same blocks of 512 tokens. Answers have
    the recorded lengths, cut at ``longest_answer``.

    Raises:
        PrefixShareError: the file cannot be read, has another format, or no request fits.
    """
    blocks: dict[int, list[int]] = {}
    found = Requests([], [])
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                length = record["input_length"]
                answer = max(1, min(record["output_length"], longest_answer))
                if length < 1 or length + answer > limit:
                    continue
                for h in record["hash_ids"]:
                    if h not in blocks:
                        rng = np.random.default_rng([3, h])
                        blocks[h] = rng.integers(0, vocab, MOONCAKE_BLOCK).tolist()
                prompt = [token for h in record["hash_ids"] for token in blocks[h]][:length]
                if len(prompt) != length:
                    raise PrefixShareError(
                        f"{path}: {len(record['hash_ids'])} hash ids are too few for {length} "
                        f"tokens in blocks of {MOONCAKE_BLOCK}."
                    )
                found.prompts.append(prompt)
                found.max_tokens.append(answer)
                if len(found.prompts) == count:
                    break
    except OSError as e:
        raise PrefixShareError(f"the trace {path} cannot be read: {e.strerror}.") from None
    except (KeyError, TypeError, ValueError) as e:
        raise PrefixShareError(f"{path} is not a Mooncake trace: {e!r}.") from None
    if not found.prompts:
        raise PrefixShareError(f"no request of {path} fits into {limit} tokens.")
    return found


Nodes = list[dict[str, Any]]


def thought_trees(path: Path, count: int) -> list[Nodes]:
    """The ``count`` largest tree-of-thoughts runs of one of DeFT's recordings: nodes with ``id``,
    ``value`` (the node's tokens) and ``children``.

    Raises:
        PrefixShareError: the file cannot be read or has another format.
    """
    try:
        runs = [list(run["data"].values()) for run in json.loads(path.read_text())]
        found = sorted(runs, key=len, reverse=True)[:count]
        _ = [(n["id"], n["value"], n["children"]) for nodes in found for n in nodes]
    except OSError as e:
        raise PrefixShareError(f"the recording {path} cannot be read: {e.strerror}.") from None
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise PrefixShareError(f"{path} is not one of DeFT's *ToT.json: {e!r}.") from None
    if not any(found):
        raise PrefixShareError(f"{path} holds no tree.")
    return found


#: (prompts, max_tokens) -> answers
Generate = Callable[[Sequence[list[int]], Sequence[int]], Batch]


def replay_thoughts(trees: Sequence[Nodes], generate: Generate, vocab: int) -> list[Batch]:
    """Grow all trees at once, level by level, by branching requests.

    The root is a prompt of random tokens. Each further node is a request: the tokens on the path to
    the node, one random token that separates it from its siblings, and generated tokens up to the
    recorded length. Its children continue the generated text.
    """
    rng = np.random.default_rng(4)
    nodes = {(t, n["id"]): n for t, tree in enumerate(trees) for n in tree}
    inner = {(t, child) for (t, _), n in nodes.items() for child in n["children"]}
    level = [
        (key, rng.integers(0, vocab, n["value"]).tolist())
        for key, n in nodes.items()
        if key not in inner
    ]
    batches = []
    while True:
        children = [
            ((t, child), path + rng.integers(0, vocab, 1).tolist())
            for (t, i), path in level
            for child in nodes[t, i]["children"]
        ]
        if not children:
            return batches
        lengths = [max(1, nodes[key]["value"] - 1) for key, _ in children]
        batch = generate([path for _, path in children], lengths)
        batches.append(batch)
        level = [
            (key, path + list(answer.token_ids))
            for (key, path), answer in zip(children, batch.answers, strict=True)
        ]
