"""`pystaged serve`: an engine behind an address that OpenAI's clients speak to."""
