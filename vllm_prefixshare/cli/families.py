"""What vLLM's code of a model family makes of a ``config.json``, where no field says it plainly.

The tables go by ``model_type``, without ``_text``. They were read in vLLM 0.29 to 0.33.
"""

from typing import Any

from packaging.version import Version

Config = dict[str, Any]
#: Fields under the names that the files of GPT-2, Bloom, MPT, ChatGLM and their kin give them.
OTHER_NAMES = {
    "num_layers": "num_hidden_layers",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "d_model": "hidden_size",
}
#: Fields that published files leave out where they are as in transformers' class.
LEFT_OUT: dict[str, Config] = {
    "llama": {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
    "mistral": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "sliding_window": 4096,
    },
    "gemma2": {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3": {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma4_unified": {"use_bidirectional_attention": "vision"},
}


def family(config: Config) -> str:
    """The ``model_type`` of the text model; "" if the file does not say."""
    return str(config.get("model_type") or "").removesuffix("_text")


def latent_rank_field(config: Config) -> str:
    """The field with the rank of the latents of MLA; "" for MiniCPM3, whose latents vLLM turns into
    keys and values before it calls plain attention.
    """
    return "" if family(config) == "minicpm3" else "kv_lora_rank"


def layers_field(config: Config) -> tuple[str, int]:
    """The field with the number of layers, and how many attention layers each of them has."""
    if family(config) == "longcat_flash" and config.get("num_layers"):
        return "num_layers", 2  # a file may have the attention layers in the usual field
    return "num_hidden_layers", 1


def as_plain(config: Config) -> Config:
    """The fields as plain attention has them, for families that say them in other words."""
    match family(config):
        case "minicpm3":  # head_dim is the part of a key that rotates; each head has its own KV
            head_dim = config.get("qk_nope_head_dim", 64) + config.get("qk_rope_head_dim", 32)
            return config | {"head_dim": head_dim, "num_key_value_heads": None}
        case "zamba2":  # it attends over the hidden state beside the model's input
            width = 2 * (config.get("hidden_size") or 0)
            return config | {"head_dim": config.get("attention_head_dim"), "hidden_size": width}
        case _:
            return config


#: Families whose scores get ALiBi slopes.
ALIBI = {"bloom", "step1"}


def has_alibi(config: Config) -> bool:
    """Whether scores get ALiBi slopes. JAIS and Baichuan left vLLM before 0.29."""
    match family(config):
        case "mpt":
            return bool((config.get("attn_config") or {}).get("alibi", True))
        case "jais":
            return config.get("position_embedding_type") == "alibi"
        case "baichuan":  # the 7B has another width, and rotates
            return config.get("hidden_size") != 4096
        case name:
            return name in ALIBI or bool(config.get("alibi"))


#: Families whose layers all have sinks, or all if the file lists ``layer_types``, or those with a
#: window if a field says so.
SINKS = {"gpt_oss", "flint"}
SINKS_WITH_TYPES = {"granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"}
SINKS_IN_WINDOWS = {
    "laguna": "swa_attention_sink_enabled",
    "mimo_v2": "add_swa_attention_sink_bias",
    "mimo_v2_flash": "add_swa_attention_sink_bias",
    "mimo_v2_omni": "add_swa_attention_sink_bias",
}


def has_sinks(config: Config, is_sliding: bool) -> bool:
    """Whether a layer has attention sinks."""
    name = family(config)
    if name in SINKS_WITH_TYPES:
        # transformers' classes for windows fill them in
        listed = config.get("layer_types") is not None or name.endswith("_swa")
        return bool(config.get("attention_sinks", listed))
    in_windows = is_sliding and bool(config.get(SINKS_IN_WINDOWS.get(name, "")))
    return name in SINKS or in_windows


def for_sliding(config: Config) -> Config:
    """The fields as a sliding layer has them: in MiMo-V2 it has a shape of its own."""
    if not family(config).startswith("mimo_v2"):
        return config
    own = {
        "num_attention_heads": "swa_num_attention_heads",
        "num_key_value_heads": "swa_num_key_value_heads",
        "head_dim": "swa_head_dim",
        "v_head_dim": "swa_v_head_dim",
        "sliding_window": "sliding_window_size",
    }
    return config | {name: config[theirs] for name, theirs in own.items() if theirs in config}


def for_full(config: Config) -> Config:
    """The fields as a layer without a window has them: in Gemma 4 it has a shape of its own."""
    name = family(config)
    is_gemma4 = name.startswith(("gemma4", "diffusion_gemma"))
    if "per_layer_config" in config:  # it says all that is special
        return config
    own = {"head_dim": config.get("global_head_dim") or (512 if is_gemma4 else None)}
    # DiffusionGemma always has keys that are values, too
    if is_gemma4 and config.get("attention_k_eq_v", name.startswith("diffusion")):
        own["num_key_value_heads"] = config.get("num_global_key_value_heads")
    return config | {field: value for field, value in own.items() if value is not None}


#: Fields that transformers 5.19 saves for single layers, of those that are read.
OF_ONE_LAYER = ("num_attention_heads", "num_key_value_heads", "head_dim")


def own_fields(config: Config) -> dict[int, tuple[tuple[str, Any], ...]]:
    """Index of a layer -> the fields in which it differs from the others."""
    layers = config.get("per_layer_config") or {}
    return {
        int(i): tuple((name, fields[name]) for name in OF_ONE_LAYER if name in fields)
        for i, fields in layers.items()
    }


def value_field(config: Config) -> str:
    """The field with the head_dim of the values, where vLLM takes a backend for another one than
    the keys have; "" for none. In MLA ``v_head_dim`` is that of another product.
    """
    if family(config).startswith("mimo_v2"):
        return "v_head_dim"
    return "v_channels"  # openPangu with sinks


#: Multimodal models whose layers let the tokens of an image see each other, by the ``model_type``
#: of the whole model, with the first release that tells the layers so. PaliGemma and Bagel are no
#: such models: vLLM makes their layers from the configuration of the text model alone, as it did
#: those of Gemma 3 before 0.33.
IMAGES_SEE_EACH_OTHER = {"gemma3": "0.33", "molmo2": "0.29", "moondream3": "0.29"}


def has_mm_prefix(config: Config, release: Version | None) -> bool:
    """Whether layers let the tokens of an image see each other, unless images are off.

    Args:
        config: as from ``read_config``.
        release: vLLM's; None for the newest.
    """
    if family(config).startswith(("gemma4", "diffusion_gemma")):
        return config.get("use_bidirectional_attention") == "vision"
    if (said := config.get("is_mm_prefix_lm")) is not None:
        return bool(said)
    since = IMAGES_SEE_EACH_OTHER.get(str(config.get("whole_model_type")))
    return since is not None and (release is None or release >= Version(since))
