"""From the name of a model to weights in memory."""
