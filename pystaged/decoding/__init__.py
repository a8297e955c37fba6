"""Decoding in steps: draft a tree, verify it, emit the accepted tokens."""
