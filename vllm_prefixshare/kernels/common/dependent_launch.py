"""Programmatic dependent launch: a kernel begins while the launch before it still runs.

A launch begins once all thread blocks of the one before have allowed it or have ended. What that
one wrote may be read after a wait for its end (CUDA's programming guide, "Programmatic Dependent
Launch and Synchronization"). A kernel that was launched in another way waits for nothing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_launch_before():
    """Wait until the launch before this one has ended, and all that it wrote can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def launch_merging(last):
    """Let merge states begin, as far as this thread block is concerned, if ``last``. It waits until
    all results are written; launched earlier, its programs would crowd on multiprocessors without a
    worker.
    """
    if last:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [],
                                  dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip
