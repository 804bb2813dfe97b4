"""The kernel for latent KV caches (MLA), in Triton, for NVIDIA GPUs."""
