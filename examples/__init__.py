"""Examples: scripts to copy in ``minimal/``, comparisons with vLLM's default backend here."""
