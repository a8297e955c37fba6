"""What may come next: samplings bound to a vocabulary, grammars, reasoning, stop strings, loops."""
