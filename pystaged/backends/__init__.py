"""Devices that run a model, by name, and models on RPC servers."""
