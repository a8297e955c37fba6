"""`pystaged distill`: trains a block draft on its target's answers."""
