"""Layers of a checkpoint, from vLLM's own reading of its ``config.json``.

vLLM's configuration classes give heads, head sizes and layer types. The tables below hold what only
the Python code of a model decides, by ``model_type`` without ``_text``, as in vLLM 0.29 to 0.33.
"""

import contextlib
import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from packaging.version import Version

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.vllm_plugin.compat import vllm_version
from vllm_prefixshare.vllm_plugin.eligibility.layer import LayerSpec

_T = TypeVar("_T")

#: Layer types that attend to all tokens of a range; other types of attention are sparse.
SLIDING = "sliding_attention"
DENSE = ("full_attention", SLIDING, "chunked_attention")
#: Names of layers with full attention; "hybrid" layers (Zamba 2) have a state, too.
FULL_NAMES = ("attention", "full_attention", "hybrid")
#: Families with ALiBi slopes, next to those that vLLM's ``ModelConfig`` knows.
ALIBI = {"bloom", "step1"}
#: What only the layers of one type have: field of the layer -> field of the file.
OWN_SHAPES = {
    ("gemma4", "full_attention"): {
        "head_size": "global_head_dim",
        "num_kv_heads": "num_global_key_value_heads",
    },
    ("mimo_v2", SLIDING): {
        "num_heads": "swa_num_attention_heads",
        "num_kv_heads": "swa_num_key_value_heads",
        "head_size": "swa_head_dim",
        "value_size": "swa_v_head_dim",
        "sliding_window": "sliding_window_size",
    },
}
#: Families with sinks in all layers, in all if the file lists ``layer_types``, or in layers with a
#: window if a field says so.
SINKS = {"gpt_oss", "flint"}
SINKS_WITH_TYPES = {"granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"}
SINKS_IN_WINDOWS = {
    "laguna": "swa_attention_sink_enabled",
    "mimo_v2": "add_swa_attention_sink_bias",
}
#: Multimodal models that tell their layers that image tokens attend to each other, with the first
#: release that does. The layers of other models know only the text model's configuration.
PASS_MM_PREFIX = {"gemma3": "0.33", "molmo2": "0.29", "moondream3": "0.29"}


@dataclass(frozen=True, kw_only=True)
class LayerKind(LayerSpec):
    """Layers of one kind. num_heads, num_kv_heads: of the model, on all GPUs. kv_cache_dtype: what
    vLLM makes of "auto".

    count: number of layers. attention: whether they have a KV cache.
    """

    name: str
    count: int
    attention: bool = True


def layer_kinds(folder: Path, release: Version | None = None) -> list[LayerKind]:
    """The kinds of layers of the checkpoint in ``folder``, in the order of their first layer.

    Only its ``config.json`` and ``hf_quant_config.json`` are read, and none of its code is run.

    Args:
        release: vLLM's, whose code makes the layers; None for the installed one.

    Raises:
        PrefixShareError: vLLM is not installed, or the files do not describe a model.
    """
    return _described(folder, release, lambda checkpoint: checkpoint.layer_kinds())


def special_weights(folder: Path) -> list[str]:
    """What makes the weights of a checkpoint other than dense ones of 16 bits, in words.

    Raises:
        PrefixShareError: as ``layer_kinds``.
    """
    return _described(folder, None, lambda checkpoint: checkpoint.special_weights())


def _described(
    folder: Path, release: Version | None, description: Callable[["_Checkpoint"], _T]
) -> _T:
    fields = _fields(folder)
    try:
        with _quiet():
            return description(_Checkpoint(folder, fields, release))
    except PrefixShareError:
        raise
    except ImportError as e:
        raise PrefixShareError(
            f"--model needs vLLM, which reads the model's config.json ({e}): install it, or give "
            "the shape by --num-qo-heads, --num-kv-heads and --head-dim."
        ) from None
    except Exception as e:  # configuration classes raise errors of any kind
        raise _not_a_model(folder / "config.json", e) from None


def _not_a_model(path: Path, error: Exception) -> PrefixShareError:
    # as ASCII: text from the file may have codes for the terminal
    reason = ascii(" ".join(str(error).split()))[1:-1]
    return PrefixShareError(f"{path} does not describe a model ({reason[:200]}).")


def _fields(folder: Path) -> dict[str, Any]:
    """The object in ``folder/config.json``.

    Raises:
        PrefixShareError: there is no such file, or it has something else.
    """
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise PrefixShareError(
            f"{folder} is no folder with a config.json: name the folder of a checkpoint (names on "
            "the Hugging Face hub are not looked up)."
        ) from None
    except (OSError, ValueError) as e:
        raise _not_a_model(path, e) from None
    if not isinstance(fields, dict):
        raise _not_a_model(path, ValueError("it is not an object"))
    return fields


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep vLLM's and transformers' remarks on a configuration out of a command's output."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Checkpoint:
    """vLLM's configuration of a checkpoint.

    whole, text: of the model, and of the text model in it. arch: its
    ``ModelArchitectureConfig``.
    """

    def __init__(self, folder: Path, fields: dict[str, Any], release: Version | None) -> None:
        self.whole = _configuration(folder, fields)
        from vllm.transformers_utils.config import get_hf_text_config

        self.text = get_hf_text_config(self.whole)
        self.arch = _architecture(self.whole, self.text)
        self.release = release or vllm_version()
        self.family = str(self.text.model_type).removesuffix("_text")
        if self.family.startswith(("gemma4", "diffusion_gemma")):
            self.family = "gemma4"
        elif self.family.startswith("mimo_v2"):
            self.family = "mimo_v2"

    def get(self, field: str, default: Any = None) -> Any:
        """A field of the text model; ``default`` if it is missing or null."""
        value = getattr(self.text, field, None)
        return default if value is None else value

    def layer_kinds(self) -> list[LayerKind]:
        """The kinds of layers, in the order of their first layer."""
        counts = Counter(
            (name, tuple(self._shape(name, index).items()))
            for index, name in enumerate(self._layer_types())
        )
        return [self._kind(name, dict(shape), n) for (name, shape), n in counts.items()]

    def special_weights(self) -> list[str]:
        """What makes the weights other than dense ones of 16 bits, in words."""
        found = {
            "experts": self.arch.num_experts,
            "quantised weights": self.arch.quantization_config,
        }
        return [name for name, value in found.items() if value]

    def _layer_types(self) -> list[str]:
        """A name for each layer, in the words of transformers' ``layer_types``."""
        # not of ``arch``, where LongCat-Flash has half the attention layers
        count = self.get("num_hidden_layers", 0)
        if not count:
            raise ValueError("it has no num_hidden_layers")
        if pattern := self.get("hybrid_layer_pattern"):  # MiMo-V2
            names = [SLIDING if x == 1 else "full_attention" for x in pattern]
        elif linear := self.get("linear_attn_config"):  # Kimi Linear, which counts from 1
            others = set(linear["kda_layers"])
            attends = [i not in others for i in range(1, count + 1)]
            names = ["full_attention" if there else "linear_attention" for there in attends]
        elif kinds := self.get("attn_type_list"):  # MiniMax-01
            names = ["full_attention" if x == 1 else "linear_attention" for x in kinds[:count]]
        elif listed := self.get("layers_block_type") or self.get("layer_types"):
            names = ["full_attention" if x in FULL_NAMES else str(x) for x in listed]
        else:
            sliding = self.get("sliding_window") and self.get("use_sliding_window", True)
            names = [SLIDING if sliding else "full_attention"] * count
        return names[:count]

    def _shape(self, name: str, index: int) -> dict[str, Any]:
        """Fields of ``LayerKind`` that may differ between layers."""
        arch = self.arch if self.arch.per_layer_overrides is None else self.arch[index]
        shape = {
            "num_heads": arch.total_num_attention_heads,
            "num_kv_heads": arch.total_num_kv_heads,
            "head_size": arch.head_size,
            # for which vLLM selects a backend; openPangu has v_channels
            "value_size": self.get("v_head_dim" if self.family == "mimo_v2" else "v_channels", 0),
            "sliding_window": self.get("sliding_window") if name == SLIDING else None,
            "kv_lora_rank": self.get("kv_lora_rank", 0) if arch.is_deepseek_mla else 0,
        }
        if self.get("kv_lora_rank") and not arch.is_deepseek_mla:
            # MiniCPM3: vLLM expands the compressed KV into keys and values of each head
            shape["head_size"] = self.text.qk_nope_head_dim + self.text.qk_rope_head_dim
            shape["num_kv_heads"] = shape["num_heads"]
        return shape | self._own_shape(name)

    def _kind(self, name: str, shape: dict[str, Any], count: int) -> LayerKind:
        """``count`` layers of this type and shape."""
        has_attention = name.endswith("attention") and name != "linear_attention"
        if has_attention and not (shape["num_heads"] and shape["num_kv_heads"]):
            raise ValueError("it has no num_attention_heads")
        if has_attention and not shape["head_size"]:
            raise ValueError("it has no head_dim and no hidden_size")
        return LayerKind(
            name=name.replace("_", " "),
            count=count,
            dtype=self._dtype(),
            attention=has_attention,
            use_mla=shape["kv_lora_rank"] > 0,
            use_sparse=hasattr(self.text, "index_topk") or (has_attention and name not in DENSE),
            has_sink=self._has_sinks(name == SLIDING),
            has_sliding_window=name == SLIDING,
            use_mm_prefix=self._has_mm_prefix(),
            chunked=name == "chunked_attention",
            logits_soft_cap=bool(self.get("attn_logit_softcapping")),
            alibi=self._has_alibi(),
            kv_cache_dtype=self._kv_cache_dtype(),
            **shape,
        )

    def _own_shape(self, name: str) -> dict[str, Any]:
        """What layers of this type have in place of the model's shape."""
        own = dict(OWN_SHAPES.get((self.family, name), {}))
        if self.family == "gemma4" and own:
            if self.arch.per_layer_overrides is not None:  # transformers 5.19 and later
                return {}
            # DiffusionGemma always has keys that are also values
            if not self.get("attention_k_eq_v", "diffusion" in self.text.model_type):
                del own["num_kv_heads"]
        found = {field: self.get(theirs) for field, theirs in own.items()}
        return {field: value for field, value in found.items() if value is not None}

    def _dtype(self) -> str:
        dtype = str(self.get("dtype") or getattr(self.whole, "dtype", None) or "bfloat16")
        dtype = dtype.removeprefix("torch.")
        # vLLM runs float32 checkpoints in 16 bits unless told otherwise
        return "bfloat16" if dtype.endswith("float32") else dtype

    def _has_sinks(self, is_sliding: bool) -> bool:
        if self.family in SINKS_WITH_TYPES:
            # transformers' classes for windows fill them in
            listed = self.get("layer_types") is not None or self.family.endswith("_swa")
            return bool(self.get("attention_sinks", listed))
        in_windows = self.get(SINKS_IN_WINDOWS.get(self.family, ""))
        return self.family in SINKS or (is_sliding and bool(in_windows))

    def _has_alibi(self) -> bool:
        from vllm.config import ModelConfig

        model: Any = SimpleNamespace(
            hf_text_config=self.text, architectures=self.arch.architectures
        )
        uses_alibi: Any = ModelConfig.__dict__["uses_alibi"]
        return self.family in ALIBI or bool(uses_alibi.fget(model))

    def _has_mm_prefix(self) -> bool:
        """Whether layers let the tokens of an image see each other, unless images are off."""
        since = PASS_MM_PREFIX.get(str(self.whole.model_type))
        if since is not None and self.release >= Version(since):
            return True
        return bool(_architecture(self.text, self.text).is_mm_prefix_lm)

    def _kv_cache_dtype(self) -> str:
        """What vLLM makes of ``--kv-cache-dtype auto``."""
        from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

        quantization = self.arch.quantization_config or {}
        if quantization.get("quant_method") == "compressed-tensors":
            # read by the layers, but not by MLA layers
            has_scheme = quantization.get("kv_cache_scheme") and not self.arch.is_deepseek_mla
            return "fp8" if has_scheme else "auto"
        model: Any = SimpleNamespace(hf_config=self.whole)
        return str(resolve_kv_cache_dtype_string("auto", model))


def _configuration(folder: Path, fields: dict[str, Any]) -> Any:
    """The configuration that vLLM loads; one with the plain fields of the file for models whose
    configuration class is code of the checkpoint, which is not run.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY, get_config

    model_type = fields.get("model_type")
    if model_type in CONFIG_MAPPING or model_type in _CONFIG_REGISTRY:
        return get_config(str(folder), trust_remote_code=False)
    named = {name: x for name, x in fields.items() if x is not None}
    text = named.pop("text_config", None)
    whole = PreTrainedConfig.from_dict(named)
    if text is not None:
        whole.text_config = PreTrainedConfig.from_dict({**named, **text})
    return whole


def _architecture(whole: Any, text: Any) -> Any:
    """VLLM's ``ModelArchitectureConfig`` of a model in which images are not switched off."""
    from vllm.config import ModelConfig

    model: Any = SimpleNamespace(
        hf_config=whole,
        hf_text_config=text,
        _supports_multimodal_for_mm_prefix=lambda: True,
        revision=None,
    )
    return ModelConfig.get_model_arch_config(model)
