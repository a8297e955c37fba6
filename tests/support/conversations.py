"""Conversations that chat templates are tried with, and what transformers makes of them.

`python tests/support/conversations.py` writes that down, where transformers is installed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

CHAT = Path(__file__).parents[1] / "chat"
TEMPLATES = {path.stem: path.read_text("utf-8") for path in sorted((CHAT / "templates").glob("*.jinja"))}
EXPECTED = CHAT / "expected.json"
BOS, EOS = "<s>", "</s>"

_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place: <rain> & \u2600, \"now\" or 'later'",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["place"],
        },
    },
}
_CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time", "parameters": {}}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"place": "K\u00f6ln"}}}


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_DATE = {"date_string": "22 Nov 2026"}
CASES: dict[str, dict[str, Any]] = {
    "question": {"messages": [says("user", "Hello, who are you?")]},
    "turns": {
        "messages": [
            says("system", "Answer in one word."),
            says("user", "2 + 2?"),
            says("assistant", "Four."),
            says("user", "And 3 + 3?"),
        ]
    },
    "white space": {
        "messages": [
            says("user", "  \n a <b>&amp;</b> 'c' \"d\"\t{{ e }} {% f %} \\n \n\n"),
            says("assistant", "\n\n \u00e9t\u00e9 \u65e5\u672c \U0001f600 \n"),
            says("user", ""),
        ]
    },
    "history": {
        "messages": [says("system", "  Be brief.  "), says("user", "a"), says("assistant", "b"), says("user", "c")],
        "add_generation_prompt": False,
    },
    "tools": {
        "messages": [says("system", "Use tools."), says("user", "How is the weather in K\u00f6ln?")],
        "tools": [_WEATHER, _CLOCK],
    },
    "calls": {
        "messages": [
            says("user", "How is the weather in K\u00f6ln?"),
            says("assistant", "", tool_calls=[_CALL]),
            says("tool", "15 \u00b0C, <dry>", tool_call_id="abcdefghi", name="weather"),
            says("assistant", "It is dry."),
            says("user", "Thanks"),
        ],
        "tools": [_WEATHER],
    },
    "several calls": {
        "messages": [
            says("user", "x"),
            says("assistant", "Let me look.", tool_calls=[_CALL, _CALL]),
            says("tool", "1", tool_call_id="abcdefghi"),
            says("tool", "2", tool_call_id="abcdefghi"),
        ],
    },
    "thoughts": {
        "messages": [
            says("user", "a"),
            says("assistant", "<think>\nlet me see\n</think>\n\nb"),
            says("user", "c"),
            says("assistant", "<think>\nonce more\n</think>\n\nd", tool_calls=[_CALL]),
            says("tool", "<tool_response>e</tool_response>"),
        ],
        "template_options": {"enable_thinking": False},
    },
    "reasoning": {
        "messages": [says("user", "a"), says("assistant", "b", reasoning_content="\nhm\n"), says("user", "c")],
        "template_options": {"enable_thinking": True},
    },
    "parts": {
        "messages": [
            says("system", [{"type": "text", "text": "Be brief. "}]),
            says("user", [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]),
        ]
    },
    "joined parts": {"messages": [says("system", "Be brief. "), says("user", " one \ntwo")]},
    "roles out of turn": {"messages": [says("user", "a"), says("user", "stop\nb\r\nc  d: e\nSTOP")]},
    "more": {
        "messages": [
            says("developer", "x"),
            says("user", "a\nb", extra={"n": 12, "k": "v"}),
            says("assistant", ""),
            says("user", "c"),
        ],
    },
}
for _case in CASES.values():
    _case["template_options"] = _DATE | _case.get("template_options", {})


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), bos_token=BOS, eos_token=EOS
    )


def transformers_writes(template: str, case: dict[str, Any]) -> str | None:
    """What transformers makes of a conversation, None where the template fails."""
    try:
        text: str = _tokenizer().apply_chat_template(
            case["messages"],
            chat_template=template,
            tools=case.get("tools"),
            tokenize=False,
            add_generation_prompt=case.get("add_generation_prompt", True),
            **case["template_options"],
        )
    except Exception:
        return None
    return text


if __name__ == "__main__":
    written = {
        name: {case: transformers_writes(template, CASES[case]) for case in CASES}
        for name, template in TEMPLATES.items()
    }
    EXPECTED.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", "utf-8")
