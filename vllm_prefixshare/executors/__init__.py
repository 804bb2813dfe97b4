"""Run a DecodePlan: ``torch`` on the CPU, ``reference`` in float64 for tests."""
