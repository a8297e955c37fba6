"""Conversations: a model's own chat template, and the prompts it makes of messages."""
