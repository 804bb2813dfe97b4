"""Host work that depends only on the shared prefix, done once: text to tokens, tokens to hashes,
hashes to blocks, copies between processes, and the start of the detokenizer.

Each module is one part. Each part returns exactly what vLLM computes, or leaves the request to
vLLM's own code, and works with every attention backend.
"""
