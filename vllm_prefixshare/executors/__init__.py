"""Run a DecodePlan: ``gpu`` on NVIDIA GPUs, ``native`` and ``torch`` on CPUs (``cpu`` chooses),
``reference`` in float64 for tests."""
