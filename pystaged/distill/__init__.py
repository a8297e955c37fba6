"""`pystaged distill`: trains a block draft on what its target writes."""
