"""Drafters: draft models and n-grams."""
