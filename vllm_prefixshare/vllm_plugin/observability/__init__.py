"""What users see of the backend: counters, metrics, traces and the log."""
