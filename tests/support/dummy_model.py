"""Checkpoints with random weights, for tests and benchmarks that must run anywhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Vocabulary size of the small models; their tokenizer has as many words.
SMALL_VOCAB = 4096
SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "vocab_size": SMALL_VOCAB,
    "max_position_embeddings": 8192,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ALTERNATING = ["sliding_attention", "full_attention"]


def write_llama_8b(folder: Path, **changes: Any) -> Path:
    """Write the ``config.json`` of the Llama-3.1-8B shape, with ``changes``. Load the model with
    ``load_format="dummy", skip_tokenizer_init=True``.

    Returns:
        folder, created if missing.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def write_small_llama(
    folder: Path,
    head_dim: int = 64,
    num_layers: int = 4,
    sliding_window: int | None = None,
    seed: int = 0,
    num_kv_heads: int = 2,
) -> Path:
    """Write a small Llama checkpoint, float16, with a tokenizer whose text is ``t5 t17 ...``.

    The weights are scaled so that attention picks few tokens and the next token depends on them, so
    that a request that read a wrong block shows.

    Args:
        sliding_window: window of every second layer, in tokens; None for none.

    Returns:
        folder, created if missing, as each function of this module.
    """
    extra: dict[str, Any] = {}
    if sliding_window is not None:
        extra["layer_types"] = [ALTERNATING[i % 2] for i in range(num_layers)]
        extra["sliding_window"] = sliding_window

    return _write(
        folder, "LlamaConfig", "LlamaForCausalLM", "float16", _sharpen, seed,
        **{**SMALL, "num_hidden_layers": num_layers},
        **_heads(8, num_kv_heads, head_dim),
        tie_word_embeddings=False,
        **extra,
    )  # fmt: skip


def _heads(query: int, kv: int, dim: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": dim}


def _sharpen(model: Any) -> None:
    model.lm_head.weight *= 2
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 1.5
        layer.self_attn.k_proj.weight *= 1.5


def write_small_mixtral(folder: Path) -> Path:
    """Write a small Mixtral checkpoint, float16: a mixture of experts, attention as
    ``write_small_llama``. All experts take part, so that rounding selects no other expert.
    """
    return _write(
        folder, "MixtralConfig", "MixtralForCausalLM", "float16", _sharpen,
        **SMALL,
        **_heads(8, 2, 64),
        sliding_window=None,
        num_local_experts=4,
        num_experts_per_tok=4,
        tie_word_embeddings=False,
    )  # fmt: skip


def write_small_gpt_oss(folder: Path) -> Path:
    """Write a small gpt-oss checkpoint, bfloat16: attention sinks in each layer, a sliding window
    in every second one. All experts take part, so that rounding selects no other expert.
    """
    import torch

    def set_sinks(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-1, 6, 16))

    return _write(
        folder, "GptOssConfig", "GptOssForCausalLM", "bfloat16", set_sinks,
        **SMALL,
        **_heads(16, 2, 64),
        num_local_experts=2,
        num_experts_per_tok=2,
        layer_types=ALTERNATING * 2,
        tie_word_embeddings=False,
    )  # fmt: skip


def write_small_bloom(folder: Path) -> Path:
    """Write a small Bloom checkpoint, bfloat16: ALiBi slopes in each layer, head_dim 64."""

    def sharpen(model: Any) -> None:
        for layer in model.transformer.h:  # so that attention picks few tokens, and outweighs
            layer.self_attention.query_key_value.weight *= 1.5  # the token before
            layer.self_attention.dense.weight *= 8

    return _write(
        folder, "BloomConfig", "BloomForCausalLM", "bfloat16", sharpen,
        vocab_size=SMALL_VOCAB,
        hidden_size=512,
        n_layer=4,
        n_head=8,
        seq_length=SMALL["max_position_embeddings"],
        initializer_range=SMALL["initializer_range"],
        bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip


def write_small_gemma2(folder: Path, sliding_window: int = 256) -> Path:
    """Write a small Gemma 2 checkpoint, bfloat16: a soft cap in each layer, low enough to matter,
    and a sliding window in every second one.
    """
    return _write(
        folder, "Gemma2Config", "Gemma2ForCausalLM", "bfloat16",
        **SMALL,
        **_heads(8, 4, 128),
        query_pre_attn_scalar=128,
        attn_logit_softcapping=2.0,
        sliding_window=sliding_window,
        layer_types=ALTERNATING * 2,
    )  # fmt: skip


def write_small_gemma3(folder: Path, sliding_window: int = 256) -> Path:
    """Write a small Gemma 3 checkpoint, float16: five layers with a sliding window and one with
    full attention, head_dim 256.
    """

    def sharpen(model: Any) -> None:
        for layer in model.model.layers:  # so that attention picks few tokens
            layer.self_attn.q_norm.weight += 0.6
            layer.self_attn.k_norm.weight += 0.6

    return _write(
        folder, "Gemma3TextConfig", "Gemma3ForCausalLM", "float16", sharpen,
        **{**SMALL, "num_hidden_layers": 6},
        **_heads(8, 4, 256),
        sliding_window=sliding_window,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )  # fmt: skip


#: Tokens of an image of ``write_small_gemma3_with_images``, and its sides in pixels.
IMAGE_TOKENS, IMAGE_SIZE = 64, 224
#: Its tokens after the words: what stands for an image, what surrounds it, and the line breaks
#: that vLLM asks for.
IMAGE_WORDS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
LINE_BREAKS = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
START_OF_IMAGE = SMALL_VOCAB + 1


def write_small_gemma3_with_images(folder: Path, sliding_window: int = 1024) -> Path:
    """Write a small Gemma 3 checkpoint for text and images, bfloat16: the text model has the shape
    of ``write_small_gemma3``. An image is ``START_OF_IMAGE`` in a prompt of token ids.
    """

    def sharpen(model: Any) -> None:
        for layer in model.model.language_model.layers:  # so that attention picks few tokens
            layer.self_attn.q_norm.weight += 0.6
            layer.self_attn.k_norm.weight += 0.6
        # so that an answer depends on the image
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.05)

    _write(
        folder, "Gemma3Config", "Gemma3ForConditionalGeneration", "bfloat16", sharpen,
        text_config={
            **SMALL,
            **_heads(8, 4, 256),
            "vocab_size": SMALL_VOCAB + 64,
            "num_hidden_layers": 6,
            "sliding_window": sliding_window,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
        vision_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": IMAGE_SIZE,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=SMALL_VOCAB,
        boi_token_index=START_OF_IMAGE,
        eoi_token_index=START_OF_IMAGE + 1,
        bos_token_id=SMALL["bos_token_id"],
        eos_token_id=SMALL["eos_token_id"],
    )  # fmt: skip
    _name_as_published(folder / "model.safetensors")
    _add_image_processor(folder)
    return folder


def _name_as_published(path: Path) -> None:
    """Name the weights of a vision tower as in published checkpoints, which vLLM reads."""
    from safetensors.torch import load_file, save_file

    tower = "vision_tower."
    tensors = {
        name if f"{tower}vision_model." in name else name.replace(tower, f"{tower}vision_model."): x
        for name, x in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})


def _add_image_processor(folder: Path) -> None:
    """Add image tokens to the tokenizer, and the files of a Gemma 3 processor."""
    from transformers import AutoTokenizer

    names = dict(zip(("image_token", "boi_token", "eoi_token"), IMAGE_WORDS, strict=True))
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=names)
    tokenizer.add_tokens(list(LINE_BREAKS))
    tokenizer.save_pretrained(folder)
    files = {
        "processor_config.json": {"image_seq_length": IMAGE_TOKENS},
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "rescale_factor": 1 / 255,
            "resample": 2,
            "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        },
    }
    for name, fields in files.items():
        fields["processor_class"] = "Gemma3Processor"
        (folder / name).write_text(json.dumps(fields, indent=1) + "\n")


#: What Qwen3-Next and Qwen3.5 have in common: three layers of gated delta nets, then one with full
#: attention, head_dim 256. The states have the real size, and so do the KV blocks, which vLLM makes
#: as large as a state.
QWEN_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": False,
}


def write_small_qwen3_next(folder: Path) -> Path:
    """Write a small Qwen3-Next checkpoint, bfloat16, 16 query and 2 KV heads, with a layer that
    drafts (MTP). All experts take part, so that rounding selects no other expert.
    """
    _write(
        folder, "Qwen3NextConfig", "Qwen3NextForCausalLM", "bfloat16",
        **{**SMALL, **QWEN_HYBRID},
        **_heads(16, 2, 256),
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )  # fmt: skip
    return _add_mtp(folder)


def write_small_qwen3_5(folder: Path) -> Path:
    """Write a small Qwen3.5 checkpoint, bfloat16, 24 query and 4 KV heads, with a layer that drafts
    (MTP).
    """
    _write(
        folder, "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", "bfloat16",
        **{**SMALL, **QWEN_HYBRID},
        **_heads(24, 4, 256),
        mtp_num_hidden_layers=1,
    )  # fmt: skip
    return _add_mtp(folder)


def _silent_copy(tensors: dict[str, Any], layer: str, to: str) -> dict[str, Any]:
    """The tensors of ``layer``, a prefix of their names, under the prefix ``to``. Attention and MLP
    of the copy add nothing, so that a model that drafts with it proposes its last choice again.
    """
    import torch

    found = {}
    for name in [name for name in tensors if name.startswith(layer)]:
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        copy = torch.zeros_like if adds else torch.clone
        found[to + name.removeprefix(layer)] = copy(tensors[name])
    return found


def _second_half(hidden: int, dtype: Any) -> Any:
    """A projection of twice ``hidden`` numbers to the second half of them: the model's output."""
    import torch

    return torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1).to(dtype)


def _add_mtp(folder: Path) -> Path:
    """Add a drafting layer to a checkpoint of Qwen3-Next or Qwen3.5."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    layers = {name.split(".")[2] for name in tensors if ".self_attn." in name}
    tensors |= _silent_copy(tensors, f"model.layers.{min(layers)}.", "mtp.layers.0.")
    norm = tensors["model.norm.weight"]
    tensors["mtp.fc.weight"] = _second_half(len(norm), norm.dtype)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        tensors[f"mtp.{name}.weight"] = torch.zeros_like(norm)  # these norms scale by 1 + weight
    save_file(tensors, path)
    return folder


#: latents of 512 numbers and 64 rotated ones in each layer, as in the large models; no experts
DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": SMALL["num_hidden_layers"] + 1,  # the layer that drafts comes last
    "tie_word_embeddings": False,
}


def write_small_deepseek_v2(folder: Path, num_heads: int = 16) -> Path:
    """Write a small DeepSeek V2 checkpoint, bfloat16, as ``DEEPSEEK``."""
    return _write_deepseek(folder, "DeepseekV2", num_heads, topk_method="greedy")


def write_small_deepseek_v3(folder: Path, num_heads: int = 16) -> Path:
    """Write a small DeepSeek V3 checkpoint, bfloat16, as ``DEEPSEEK``, with a layer that drafts
    (MTP).
    """
    import torch
    from safetensors.torch import load_file, save_file

    _write_deepseek(folder, "DeepseekV3", num_heads, num_nextn_predict_layers=1)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    drafts = f"model.layers.{SMALL['num_hidden_layers']}."
    tensors |= _silent_copy(tensors, "model.layers.0.", drafts)
    norm = tensors["model.norm.weight"]
    tensors[f"{drafts}eh_proj.weight"] = _second_half(len(norm), norm.dtype)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{drafts}{name}.weight"] = torch.ones_like(norm)
    tensors[f"{drafts}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{drafts}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    return folder


def _write_deepseek(folder: Path, name: str, num_heads: int, **fields: Any) -> Path:
    def sharpen(model: Any) -> None:
        model.lm_head.weight *= 2
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 1.5

    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    fields = {**SMALL, **DEEPSEEK, **heads, **fields}
    return _write(folder, f"{name}Config", f"{name}ForCausalLM", "bfloat16", sharpen, **fields)


def _write(
    folder: Path,
    config: str,
    model: str,
    dtype: str,
    change: Callable[[Any], None] | None = None,
    seed: int = 0,
    **fields: Any,
) -> Path:
    """Write a model with random weights, and a tokenizer.

    Args:
        config: name of a class of transformers; ``fields`` are its arguments. model: another one.
        change: is called with the model before it is written.
    """
    import torch
    import transformers

    configuration = getattr(transformers, config)(**fields)
    torch.manual_seed(seed)
    made = getattr(transformers, model)(configuration)
    if change is not None:
        with torch.no_grad():
            change(made)
    made.to(getattr(torch, dtype)).save_pretrained(folder)
    _write_word_tokenizer(folder)
    return folder


def _write_word_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(SMALL_VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", unk_token="t2"
    ).save_pretrained(folder)


def add_kv_scales(folder: Path, of_heads: bool = False, last: float | None = None) -> Path:
    """Add scales for an fp8 KV cache to a small Llama checkpoint, as llm-compressor writes them:
    other ones for queries, keys and values and for each layer, no powers of two, and so large that
    no number is clipped.

    Args:
        of_heads: whether each head has scales of its own.
        last: v_scale of the last layer in place of its own.
    """
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "config.json"
    config = json.loads(path.read_text())
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {**scheme, "strategy": "attn_head" if of_heads else "tensor"},
    }
    path.write_text(json.dumps(config, indent=1) + "\n")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    queries, heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        for name, first, count in (("q", 0.05, queries), ("k", 0.03, heads), ("v", 0.022, heads)):
            scales = first * (1 + 0.15 * layer + 0.4 * torch.arange(count) / count)
            # one scale: that of the first head
            scales = scales.view(-1, 1, 1) if of_heads else scales[:1]
            tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = scales
    if last is not None:
        tensors[f"model.layers.{layers - 1}.self_attn.v_scale"].fill_(last)
    save_file(tensors, weights, {"format": "pt"})
    return folder


def write_eagle(folder: Path, model: Path) -> Path:
    """Write an EAGLE drafter of one layer for ``model``, a folder from ``write_small_llama``."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    layer = _silent_copy(weights, "model.layers.0.", "layers.0.")
    tensors = {name: tensor for name, tensor in layer.items() if "input_layernorm" not in name}
    tensors["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    tensors["fc.weight"] = _second_half(config["hidden_size"], torch.float16)
    config |= {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    config.pop("layer_types", None)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def write_lora(folder: Path, model: Path, rank: int = 8, seed: int = 0) -> Path:
    """Write a random LoRA adapter of the query and value projections of ``model``, a folder from
    ``write_small_llama``.

    Returns:
        folder, created if missing.
    """
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    outputs = {
        "q_proj": shape["num_attention_heads"] * dim,
        "v_proj": shape["num_key_value_heads"] * dim,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, rows in outputs.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, size in (("lora_A", (rank, hidden)), ("lora_B", (rows, rank))):
                weight = 0.05 * torch.randn(size, generator=generator)
                tensors[f"{key}.{part}.weight"] = weight.to(torch.float16)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(outputs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder
