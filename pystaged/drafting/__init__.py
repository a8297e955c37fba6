"""Who proposes tokens: a draft model, n-grams."""
