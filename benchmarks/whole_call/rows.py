"""Rows of the benchmark: named configurations of an engine."""

import importlib.util
from dataclasses import dataclass

from benchmarks.support.baselines import BASELINES, Baseline
from vllm_prefixshare.settings import VARIABLES

#: The setting that selects which parts of the host's work are done once per shared prefix.
PROMPTS = "VLLM_PREFIXSHARE_PROMPTS"
FASTOKENS = "VLLM_USE_FASTOKENS"
#: FLASH_ATTN is replaced by vLLM's own backend on a machine without a GPU.
BASELINE_BACKEND, CPU_BACKEND = "FLASH_ATTN", "CPU_ATTN"


@dataclass(frozen=True, slots=True)
class Row(Baseline):
    """One configuration.

    prompts: value of VLLM_PREFIXSHARE_PROMPTS, or None to leave it unset.
    fastokens: whether vLLM tokenizes with fastokens.
    """

    prompts: str | None = "off"
    fastokens: bool = False

    def backend_on(self, gpu: bool) -> str:
        """The attention backend to pass to vLLM on this kind of machine."""
        return CPU_BACKEND if self.backend == BASELINE_BACKEND and not gpu else self.backend

    def environment(self) -> dict[str, str]:
        """Environment variables of the row's processes."""
        found = {FASTOKENS: "1" if self.fastokens else "0", **Baseline.environment(self)}
        # a version without the setting rejects it, and does what "off" asks for
        if self.prompts is not None and PROMPTS in VARIABLES:
            found[PROMPTS] = self.prompts
        return found

    def unavailable(self) -> str | None:
        """Why the row cannot run with the installed packages, or None if it can."""
        if self.prompts != "off" and PROMPTS not in VARIABLES:
            return f"this version has no setting {PROMPTS}"
        if self.fastokens and importlib.util.find_spec("fastokens") is None:
            return "the package fastokens is not installed"
        return Baseline.unavailable(self)


#: The first row is the baseline.
ROWS: dict[str, Row] = {
    "flash_attn": Row("FLASH_ATTN"),
    "flash_attn_fastokens": Row("FLASH_ATTN", fastokens=True),
    "prefix_share_kernel_only": Row("PREFIX_SHARE"),
    "flash_attn_prompts": Row("FLASH_ATTN", prompts="on"),
    "prefix_share": Row("PREFIX_SHARE", prompts=None),
    "prefix_share_fastokens": Row("PREFIX_SHARE", prompts=None, fastokens=True),
}
#: Further baselines, measured where the user names them.
EXTRA_ROWS: dict[str, Row] = {
    name: Row(of.backend, of.cascade) for name, of in BASELINES.items() if name not in ROWS
}
ALL_ROWS = {**ROWS, **EXTRA_ROWS}
