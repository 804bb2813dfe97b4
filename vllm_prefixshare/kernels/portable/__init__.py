"""The kernel for every NVIDIA GPU from compute capability 8.0 on, in Triton."""
