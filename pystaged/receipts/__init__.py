"""Texts that can be checked: receipts, repetition, comparison."""
