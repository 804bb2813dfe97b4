"""Which kernel serves a layer on a GPU."""

import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.contract import Kernel
from vllm_prefixshare.kernels.hopper.launch import HopperKernel
from vllm_prefixshare.kernels.portable.launch import PortableKernel
from vllm_prefixshare.records import PrefixShareError

KERNELS = ("auto", "hopper", "portable")


def choose_kernel(
    attention: AttentionConfig, device: torch.device, kernel: str, query_len: int
) -> Kernel:
    if kernel not in KERNELS:
        raise PrefixShareError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}.")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise PrefixShareError(f"device {str(device)!r} is not an NVIDIA GPU that can be used.")
    if attention.dtype not in ("bfloat16", "float16"):
        raise PrefixShareError(
            f"dtype must be bfloat16 or float16 on a GPU, got {attention.dtype}."
        )
    if query_len < 1:
        raise PrefixShareError(f"max_query_len must be at least 1, got {query_len}.")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise PrefixShareError(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}: 8.0 is the least."
        )
    hopper = HopperKernel.serves(attention, capability)
    if kernel == "hopper" and not hopper:
        raise PrefixShareError(
            "kernel 'hopper' needs compute capability 9.0 and blocks of 16, 32, 64 or 128 "
            f"tokens (64 at most above head_dim 128), got {capability[0]}.{capability[1]} and "
            f"{attention.block_size}: use kernel='auto'."
        )
    if kernel != "portable" and hopper:
        return HopperKernel(attention, query_len, device)
    return PortableKernel(attention, query_len, device)
