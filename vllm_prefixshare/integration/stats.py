"""What the backend did, counted in the worker and read over vLLM's own RPC."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class BackendStats:
    """Counters of one worker process, over all its KV-cache groups; times in seconds.

    decode_steps: engine steps with at least one decode row, once per KV-cache group.
    shared_steps: those in which rows shared KV.
    layer_calls, layer_seconds: attention layers that ran shared rows, and their time; on a CPU.
    kv_tokens_read, kv_tokens_stock: KV tokens per layer that decode rows read here, and would
        read each on its own.
    plans, plan_seconds: plans made, and put on the device.
    build_seconds: all that was added to building metadata, on a CPU.
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
        """A step whose decode rows have ``tokens`` of KV, of which ``saved`` are not read."""
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


class PrefixShareWorkerExtension:
    """Mixed into vLLM's worker: ``llm.collective_rpc("prefix_share_stats")``."""

    def prefix_share_stats(self, reset: bool = False) -> dict[str, float]:
        """Counters since the start or the last reset; see ``BackendStats``."""
        result = STATS.as_dict()
        if reset:
            STATS.reset()
        return result
