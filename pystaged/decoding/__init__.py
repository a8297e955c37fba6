"""One step after the other: draft a tree, verify it, emit what stands."""
