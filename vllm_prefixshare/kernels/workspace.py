"""Device buffers that outlive a plan: a captured CUDA graph keeps their addresses."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_prefixshare.core import IntArray, PrefixShareError

RING = 4  # host buffers: plans that the host may be ahead of the GPU without waiting
GAP = 4096  # words of two arrays this close are copied together


class DeviceArrays:
    """Named int32 arrays in one device buffer.

    Each array has a fixed place with some room to grow. A buffer that turns out too small is
    replaced by a larger one, until a CUDA graph has captured it: from then on growing raises.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured = False
        self.arrays: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._buffer = torch.zeros(0, dtype=torch.int32, device=device)
        self._ring: list[_HostBuffer] = []
        self._loaded: Mapping[str, IntArray] = {}

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make room for arrays of these lengths; what was loaded stays.

        Raises:
            PrefixShareError: there is less room, and a CUDA graph holds the buffer.
        """
        if self._grow(sizes) and self._loaded:
            self._copy()

    def _grow(self, sizes: Mapping[str, int]) -> bool:
        """Whether there is a new buffer, empty and with room for arrays of these lengths."""
        short = [name for name, n in sizes.items() if n > self._sizes.get(name, -1)]
        if not short:
            return False
        require_free(self.captured, f"{short[0]} of {sizes[short[0]]} entries")
        # half as much again to grow, in multiples of 32 bytes
        wanted = {name: -(-(n + n // 2 + 1) // 8) * 8 for name, n in sizes.items()}
        grown = {name: max(n, self._sizes.get(name, 0)) for name, n in wanted.items()}
        total = sum(grown.values())
        for used in self._ring:
            used.wait()
        # all that may run out of memory comes first, so that what is there stays right
        ring = [_HostBuffer(total, self.device) for _ in range(RING)]
        buffer = torch.zeros(total, dtype=torch.int32, device=self.device)
        self._sizes, self._ring, self._buffer = grown, ring, buffer
        self.arrays = dict(zip(grown, buffer.split(list(grown.values())), strict=True))
        return True

    def load(self, arrays: Mapping[str, IntArray]) -> None:
        """Copy new contents, after all work queued on this stream before. Does not wait for
        the GPU unless it is ``RING`` plans behind.

        Raises:
            PrefixShareError: see ``reserve``.
        """
        self._grow({name: array.size for name, array in arrays.items()})
        self._loaded = arrays
        self._copy()

    def _copy(self) -> None:
        buffer = self._ring.pop(0)
        self._ring.append(buffer)
        buffer.wait()
        host, at = buffer.words.numpy(), 0
        spans: list[tuple[int, int]] = []
        for name, size in self._sizes.items():
            array = self._loaded[name]
            end = at + array.size
            host[at:end] = array.ravel()
            if "indptr" in name or "start_loc" in name:
                # overwrite entries left by a larger batch with the last entry
                host[end : at + size] = array.flat[-1] if array.size else 0
                end = at + size
            if spans and at - spans[-1][1] <= GAP:
                spans[-1] = spans[-1][0], end
            else:
                spans.append((at, end))
            at += size
        with torch.inference_mode():  # the buffer may have been made in it
            for first, last in spans:
                self._buffer[first:last].copy_(buffer.words[first:last], non_blocking=True)
        buffer.note_copy()


class _HostBuffer:
    """Pinned words that a copy to the device may still be reading."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.words = torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def note_copy(self) -> None:
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Until the last copy has read the words."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()


class PartialResults:
    """Partial results of work tiles, to be merged; executors on one stream may share them.

    Args:
        shape: ``(num_qo_heads, head_dim)`` of a partial result.
        query_len: query tokens that each partial result holds.

    Attributes:
        out: float32 ``[num_partials * query_len, num_qo_heads, head_dim]``.
        lse: float32 ``[num_partials * query_len, num_qo_heads]``, natural logarithm.
        captured: a CUDA graph holds them.
    """

    def __init__(self, device: torch.device, shape: tuple[int, int], query_len: int) -> None:
        self._device, self._shape, self._query_len = device, shape, query_len
        self.captured = False
        self._allocate(0)

    def holds(self, num_partials: int) -> bool:
        """Whether there is room for so many."""
        return num_partials * self._query_len <= len(self.lse)

    def reserve(self, num_partials: int) -> None:
        """Make room for partial results.

        Raises:
            PrefixShareError: there is less room, and a CUDA graph holds the buffers.
        """
        if self.holds(num_partials):
            return
        require_free(self.captured, f"{num_partials} partial results")
        tokens = num_partials * self._query_len
        self._allocate(tokens + tokens // 2)

    def _allocate(self, tokens: int) -> None:
        # not torch's default: vLLM makes layers while that is the model's dtype
        options: dict[str, Any] = {"dtype": torch.float32, "device": self._device}
        out = torch.empty(tokens, *self._shape, **options)
        self.lse = torch.empty(tokens, self._shape[0], **options)
        self.out = out


class Workspace:
    """The current plan, the shape of its queries, and the partial results of its tiles."""

    def __init__(self, device: torch.device, partials: PartialResults) -> None:
        self.plan = DeviceArrays(device)
        self.queries = DeviceArrays(device)
        self.partials = partials

    def note_launch(self) -> bool:
        """Whether a launch is inside a CUDA graph; then mark the buffers as captured."""
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            self.plan.captured = self.queries.captured = self.partials.captured = True
        return capturing


def require_free(captured: bool, what: str) -> None:
    """Raise ``PrefixShareError`` if a CUDA graph holds the buffer that ``what`` exceeds."""
    if captured:
        raise PrefixShareError(
            f"{what} exceed the workspace that a CUDA graph has captured: call reserve() for "
            "the largest batch before the capture."
        )
