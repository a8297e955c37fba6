"""Public clients, each with its own types."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from support.server import NAME

from pystaged.engine import Engine

GREEDY: Any = {"model": NAME, "temperature": 0, "max_tokens": 12}


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "pystaged")
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_completions(client: openai.OpenAI, engine: Engine) -> None:
    found = client.completions.create(prompt="the tree", echo=True, logprobs=2, **GREEDY)
    assert found.choices[0].text == "the tree" + engine.generate("the tree", max_tokens=12).text
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert found.usage is not None
    assert len(logprobs.tokens) == found.usage.total_tokens
    parts = list(client.completions.create(prompt="the tree", stream=True, **GREEDY))
    assert "the tree" + "".join(part.choices[0].text for part in parts) == found.choices[0].text
