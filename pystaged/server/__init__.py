"""`pystaged serve`: an OpenAI- and Anthropic-compatible server for an engine."""
