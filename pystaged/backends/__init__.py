"""Backends that run a model: pystaged's CPU kernels, ggml's devices, and RPC servers."""
