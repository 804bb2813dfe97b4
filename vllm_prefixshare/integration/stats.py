"""Counters of the backend in each worker, read with vLLM's ``collective_rpc``."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class BackendStats:
    """Counters of one worker process, summed over its KV-cache groups; times in seconds.

    decode_steps: engine steps with at least one decode, counted once per KV-cache group.
    shared_steps: decode steps in which requests shared KV.
    layer_calls, layer_seconds: attention layers that ran shared decodes, and their time (CPU only).
    kv_tokens_read: KV tokens per layer that decodes read.
    kv_tokens_stock: KV tokens per layer that they would read one by one.
    plans, plan_seconds: plans made and copied to the device, and their time.
    build_seconds: time that planning adds to building metadata (CPU only).
    """

    decode_steps: int = 0
    shared_steps: int = 0
    layer_calls: int = 0
    layer_seconds: float = 0.0
    kv_tokens_read: int = 0
    kv_tokens_stock: int = 0
    plans: int = 0
    plan_seconds: float = 0.0
    build_seconds: float = 0.0

    def note_plan(self, seconds: float) -> None:
        self.plans += 1
        self.plan_seconds += seconds

    def note_step(self, tokens: int, saved: int) -> None:
        """Count a step whose decodes have ``tokens`` of KV and read all but ``saved`` of them."""
        self.decode_steps += 1
        self.shared_steps += saved > 0
        self.kv_tokens_stock += tokens
        self.kv_tokens_read += tokens - saved

    def as_dict(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def reset(self) -> None:
        for f in fields(self):
            setattr(self, f.name, f.default)


#: The counters of this process.
STATS = BackendStats()


#: Values of the counters when they were last taken.
_TAKEN: dict[str, float] = {}


def take_stats() -> dict[str, float]:
    """What this process counted since the last call, for the loggers of a patched vLLM."""
    taken = {}
    for name, value in STATS.as_dict().items():
        before = _TAKEN.get(name, 0)
        since = value - before if value >= before else value  # a reset came between
        if since:
            taken[f"prefix_share_{name}"] = since
        _TAKEN[name] = value
    return taken


class PrefixShareWorkerExtension:
    """Mixed into vLLM's worker: ``llm.collective_rpc("prefix_share_stats")``."""

    def prefix_share_stats(self, reset: bool = False) -> dict[str, float]:
        """Counters since the start or the last reset; see ``BackendStats``."""
        result = STATS.as_dict()
        if reset:
            STATS.reset()
        return result
