"""`pystaged serve`: an OpenAI-compatible server for an engine."""
