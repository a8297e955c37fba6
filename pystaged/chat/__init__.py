"""Conversations as prompts, by a model's own chat template."""

ENDLESS = "does not come to an end, or writes far more than its messages"


class ChatTemplateError(ValueError):
    """A chat template that is damaged, fails, refuses the messages, or does not come to an end."""
