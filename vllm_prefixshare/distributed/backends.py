"""What is peculiar to gloo and nccl: whether they are there, their environment, their messages."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def errors_left_to_us() -> Iterator[None]:
    """A group of nccl that is made here has no thread that ends the process after an error, or
    keeps it from ending: the watchdog would write down the state of nccl and wait for a minute, and
    the monitor of its heartbeat, whose end the group waits for, for eight.
    """
    chosen = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5",
        "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    }
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def problem_of(backend: str, device: torch.device) -> str | None:
    """Why ``backend`` cannot carry tensors of ``device``; None if it can."""
    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    if backend not in there:
        return f"backend must be gloo or nccl, got {backend!r}."
    if not dist.is_gloo_available() or not there[backend]():
        return f"this torch has no backend {backend!r}: install one that has it."
    if (backend == "nccl") != (device.type == "cuda"):
        return f"backend {backend!r} does not carry tensors on {device.type}: leave it out."
    return None


def one_line(error: BaseException) -> str:
    """The first sentence of what went wrong, without the places in gloo's source."""
    lines = str(error).strip().splitlines()
    text = re.sub(r"^(\[\S+:\d+\] *)+", "", lines[0]) if lines else ""
    if late := re.match(r"Timed out waiting \d+ms for (recv|send) operation", text):
        return "no message came" if late[1] == "recv" else "no rank took the message"
    return (text or type(error).__name__).split(". ")[0].rstrip(".")[:200]


def listed(ranks: list[int]) -> str:
    """Ranks in a sentence."""
    return ", ".join(map(str, ranks))
