"""PREFIX_SHARE for multi-head latent attention (MLA), on NVIDIA GPUs of compute capability 9.0."""
