"""Where a model runs: our kernels, ggml's devices, other machines."""
