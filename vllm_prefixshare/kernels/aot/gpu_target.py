"""A GPU to compile for, in a process without one."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.catalog import SHARED_MEMORY, Gpu


class StandInDriver:
    """A Triton driver that names the GPU to compile for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.arch = 10 * capability[0] + capability[1]

    def get_current_target(self) -> GPUTarget:
        """The target that Triton compiles for."""
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """A number in place of a device's index."""
        return self.arch  # Triton keeps what it compiles apart by this number

    def get_current_stream(self, device: int) -> int:
        """A number in place of a stream's handle."""
        return 0


def stand_in(capability: tuple[int, int]) -> Gpu:
    """Make Triton compile for this GPU in the rest of the process, which can then not launch.

    Raises:
        PrefixShareError: an unknown compute capability.
    """
    if capability not in SHARED_MEMORY:
        known = ", ".join(f"{major}.{minor}" for major, minor in SHARED_MEMORY)
        raise PrefixShareError(f"capability must be one of {known}, got {capability}.")
    driver: Any = StandInDriver(capability)  # the part of Triton's `DriverBase` that compiling uses
    triton.runtime.driver.set_active(driver)
    return Gpu(capability, 132, SHARED_MEMORY[capability] << 10)  # any number of multiprocessors
