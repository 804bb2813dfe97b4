"""Parts of ``bench_whole_call.py``: rows, texts, workloads, measurements, comparison, tables."""
