"""Right results: fidelity of tokens, compute-sanitizer, long runs under load."""
