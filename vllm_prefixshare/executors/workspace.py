"""Device buffers that outlive a plan: a captured CUDA graph keeps their addresses."""

from collections.abc import Mapping

import torch

from vllm_prefixshare.types import IntArray, PrefixShareError


class DeviceArrays:
    """Named int32 arrays in one device buffer, so that new contents are one copy.

    Each array has a fixed place with some room to grow. A buffer that turns out too small is
    replaced by a larger one, until a CUDA graph has captured it: from then on it is refused.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured = False
        self.arrays: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._buffer = torch.zeros(0, dtype=torch.int32, device=device)
        self._host = torch.zeros(0, dtype=torch.int32)
        self._copied: torch.cuda.Event | None = None
        self._loaded: Mapping[str, IntArray] = {}

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make room for arrays of these lengths; what was loaded stays.

        Raises:
            PrefixShareError: there is less room, and a CUDA graph holds the buffer.
        """
        short = [name for name, n in sizes.items() if n > self._sizes.get(name, -1)]
        if not short:
            return
        require_free(self.captured, f"{short[0]} of {sizes[short[0]]} entries")
        # half as much again to grow, in multiples of 32 bytes
        wanted = {name: -(-(n + n // 2 + 1) // 8) * 8 for name, n in sizes.items()}
        self._sizes = {name: max(n, self._sizes.get(name, 0)) for name, n in wanted.items()}
        total = sum(self._sizes.values())
        self._wait()
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._buffer = torch.zeros(total, dtype=torch.int32, device=self.device)
        parts = self._buffer.split(list(self._sizes.values()))
        self.arrays = dict(zip(self._sizes, parts, strict=True))
        if self._loaded:
            self._copy()

    def load(self, arrays: Mapping[str, IntArray]) -> None:
        """Copy new contents, after all work queued on this stream before.

        Raises:
            PrefixShareError: see ``reserve``.
        """
        self._loaded = {}  # not worth moving to a larger buffer
        self.reserve({name: array.size for name, array in arrays.items()})
        self._loaded = arrays
        self._copy()

    def _copy(self) -> None:
        self._wait()
        host, at = self._host.numpy(), 0
        for name, size in self._sizes.items():
            array = self._loaded[name]
            host[at : at + array.size] = array.ravel()
            # an indptr past its end stays level: nothing of a larger plan is left behind
            host[at + array.size : at + size] = array.flat[-1] if array.size else 0
            at += size
        self._buffer.copy_(self._host, non_blocking=True)
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _wait(self) -> None:
        """Until the last copy has read the host buffer."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


class Workspace:
    """The plan in force, the shape of its queries, and the partial results of its tiles.

    Args:
        partial_shape: ``(num_qo_heads, head_dim)`` of a partial result.
        query_len: query tokens that each partial result holds.

    Attributes:
        partial_out: float32 ``[num_partials * query_len, num_qo_heads, head_dim]``.
        partial_lse: float32 ``[num_partials * query_len, num_qo_heads]``, natural logarithm.
    """

    def __init__(
        self, device: torch.device, partial_shape: tuple[int, int], query_len: int
    ) -> None:
        self.plan = DeviceArrays(device)
        self.queries = DeviceArrays(device)
        self._shape = partial_shape
        self._query_len = query_len
        self._device = device
        self.partial_out = torch.empty(0, *partial_shape, device=device)
        self.partial_lse = torch.empty(0, partial_shape[0], device=device)

    def reserve_partials(self, num_partials: int) -> None:
        """Make room for partial results.

        Raises:
            PrefixShareError: there is less room, and a CUDA graph holds the buffers.
        """
        tokens = num_partials * self._query_len
        if tokens <= len(self.partial_lse):
            return
        require_free(self.plan.captured, f"{num_partials} partial results")
        tokens += tokens // 2
        heads, head_dim = self._shape
        self.partial_out = torch.empty(tokens, heads, head_dim, device=self._device)
        self.partial_lse = torch.empty(tokens, heads, device=self._device)

    def note_launch(self) -> None:
        """From the first launch inside a CUDA graph on, nothing moves."""
        if not self.plan.captured and torch.cuda.is_current_stream_capturing():
            self.plan.captured = self.queries.captured = True


def require_free(captured: bool, what: str) -> None:
    """Raises ``PrefixShareError`` if a CUDA graph holds the buffer that ``what`` exceeds."""
    if captured:
        raise PrefixShareError(
            f"{what} exceed the workspace that a CUDA graph has captured: call reserve() for "
            "the largest batch before the capture."
        )
