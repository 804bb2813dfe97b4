"""Features of a layer beyond plain attention, and the scales of quantised queries and KV."""

import math
from numbers import Real
from typing import Any, NamedTuple

import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError


class LayerExtras(NamedTuple):
    """Values of one layer in addition to its softmax scale.

    Attributes:
        sinks: ``[num_qo_heads]`` logits, float32 or the layer's dtype: one more weight in the
            denominator of every query of the head, without a value. A log-sum-exp includes the
            sink, so only one of several states to merge may have it. None for none.
        soft_cap: scaled scores ``s`` become ``soft_cap * tanh(s / soft_cap)``; 0 for none.
        alibi_slopes: float32 ``[num_qo_heads]``: ``slope * d`` is subtracted from the score of a
            key ``d`` tokens before the query, after the soft cap. None for none.
        q_scale: factor of quantised queries: a number, or float32 ``[1]`` or ``[num_kv_heads]``
            on the device of the attention; 1 if None.
        k_scale: factor of quantised keys, as ``q_scale``.
        v_scale: factor of quantised values, as ``q_scale``.
    """

    sinks: torch.Tensor | None = None
    soft_cap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    q_scale: torch.Tensor | float | None = None
    k_scale: torch.Tensor | float | None = None
    v_scale: torch.Tensor | float | None = None


PLAIN = LayerExtras()


def checked_extras(
    extras: LayerExtras | None,
    attention: AttentionConfig,
    device: torch.device,
    read: bool = True,
) -> LayerExtras:
    """The extras as kernels take them: scales as float32 ``[num_kv_heads]`` tensors (a single value
    may have stride 0) where values are quantised, None elsewhere.

    Args:
        read: check the values of scales on the device, which waits for the GPU.

    Raises:
        PrefixShareError: a tensor of another shape, dtype or device, scales that are not positive
            and finite, or a feature that ``attention`` does not name.
    """
    x = PLAIN if extras is None else extras
    if not isinstance(x, LayerExtras):
        raise PrefixShareError(f"extras must be LayerExtras, got {type(x).__name__}.")
    asked = {
        "sinks": x.sinks is not None,
        "soft_cap": x.soft_cap != 0,
        "alibi": x.alibi_slopes is not None,
    }
    is_number = isinstance(x.soft_cap, Real)
    if not (is_number and x.soft_cap >= 0 and math.isfinite(x.soft_cap)):
        raise PrefixShareError(f"soft_cap must be 0 or more and finite, got {x.soft_cap}.")
    for feature, is_asked in asked.items():
        if is_asked and feature not in attention.features:
            raise PrefixShareError(f"{feature} was not announced: name it among the features.")
    heads = attention.num_qo_heads
    dtypes = (torch.float32, getattr(torch, attention.dtype))
    _require_heads("sinks", x.sinks, heads, dtypes, device)
    _require_heads("alibi_slopes", x.alibi_slopes, heads, dtypes[:1], device)
    quantised = {
        "q_scale": attention.query_dtype is not None,
        "k_scale": attention.kv_dtype is not None,
        "v_scale": attention.kv_dtype is not None,
    }
    q_scale, k_scale, v_scale = (
        _scale(name, getattr(x, name), is_quantised, attention, device, read)
        for name, is_quantised in quantised.items()
    )
    # a float in any case: kernels take the record, and Triton makes another binary for an integer
    soft_cap = float(x.soft_cap)
    return x._replace(soft_cap=soft_cap, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)


def _require_heads(
    name: str,
    values: torch.Tensor | None,
    heads: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if values is None:
        return
    if not isinstance(values, torch.Tensor) or values.shape != (heads,):
        shape = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise PrefixShareError(f"{name} must be [{heads}], one for each query head, got {shape}.")
    if values.dtype not in dtypes or values.device != device or not values.is_contiguous():
        wanted = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise PrefixShareError(
            f"{name} must be contiguous {wanted} on {device}, got {values.dtype} on "
            f"{values.device}."
        )


def _scale(
    name: str,
    value: torch.Tensor | float | None,
    is_quantised: bool,
    attention: AttentionConfig,
    device: torch.device,
    read: bool,
) -> torch.Tensor | None:
    if not is_quantised:
        if value is not None:
            raise PrefixShareError(f"{name} is for quantised numbers, and this layer has none.")
        return None
    heads = attention.num_kv_heads
    given: Any = value
    if not isinstance(value, torch.Tensor):
        if given is not None and not isinstance(given, Real):
            raise PrefixShareError(f"{name} must be a number or a tensor, got {given!r}.")
        number: Any = 1.0 if given is None else given
        if number > torch.finfo(torch.float32).max:  # rejected below, as infinite
            number = math.inf
        value = torch.full((1,), number, dtype=torch.float32, device=device)
    elif value.dtype != torch.float32 or value.device != device:
        raise PrefixShareError(
            f"{name} must be float32 on {device}, got {value.dtype} on {value.device}."
        )
    if value.numel() not in (1, heads) or value.dim() > 1:
        raise PrefixShareError(f"{name} must be [1] or [{heads}], got {list(value.shape)}.")
    if read and not bool(((value > 0) & value.isfinite()).all()):
        raise PrefixShareError(f"{name} must be positive and finite, got {value.tolist()}.")
    return value.reshape(-1).expand(heads)
