"""pystaged inside other programs: llm, lm-evaluation-harness, pytest, notebooks."""
