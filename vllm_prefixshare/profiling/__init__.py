"""Measured costs: ``measure`` and ``measure_gpu`` fill a cost table, ``tables`` finds the right
one among those measured on this machine and those shipped in the folder ``tables``."""
