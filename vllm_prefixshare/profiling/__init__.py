"""Measures cost tables.

``cpu_table`` and ``gpu_table`` run an executor under plans made to be timed (``repeated_tiles``);
``gpu_timing`` times GPU kernels as a decode step sees them.
"""
