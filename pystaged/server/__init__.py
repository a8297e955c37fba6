"""`pystaged serve`: a server for clients of OpenAI, Anthropic and Ollama."""
