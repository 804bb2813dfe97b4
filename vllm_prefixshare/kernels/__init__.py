"""GPU kernels and their launch functions: tensors in, tensors out, no policy."""
