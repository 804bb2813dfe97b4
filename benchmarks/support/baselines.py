"""Backends of vLLM that PREFIX_SHARE is compared with, by the names that benchmarks take."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tests.support.engine import RUNNERS

#: the first vLLM without cascade attention
WITHOUT_CASCADE = (0, 32)


@dataclass(frozen=True, slots=True)
class Baseline:
    """One of vLLM's own ways to attend.

    backend: name of the attention backend.
    cascade: whether vLLM may use cascade attention, where its heuristics choose it.
    """

    backend: str
    cascade: bool = False

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``, without the backend."""
        return {"disable_cascade_attn": False} if self.cascade else {}

    def environment(self) -> dict[str, str]:
        """Environment variables of its engine: only the V1 runner has cascade attention."""
        return dict(RUNNERS["V1"]) if self.cascade else {}

    def unavailable(self) -> str | None:
        """Why the installed vLLM does not have it, or None if it does."""
        try:
            installed = version("vllm")
        except PackageNotFoundError:  # said where an engine starts
            return None
        if self.cascade and tuple(map(int, installed.split(".")[:2])) >= WITHOUT_CASCADE:
            return f"cascade attention needs vLLM 0.29 to 0.31, installed is {installed}"
        return None


BASELINES = {
    "flash_attn": Baseline("FLASH_ATTN"),
    "flashinfer": Baseline("FLASHINFER"),
    "triton_attn": Baseline("TRITON_ATTN"),
    "cascade": Baseline("FLASH_ATTN", cascade=True),
}
