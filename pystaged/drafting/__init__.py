"""Drafters: draft models, draft heads and n-grams."""
