"""What can be chosen: options, their checks, other programs' names for them, what the makers of a model recommend."""
