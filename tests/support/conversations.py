"""Conversations that chat templates are tried with, and what transformers makes of what they mean to each.

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


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CASES: dict[str, dict[str, Any]] = json.loads((CHAT / "conversations.json").read_text("utf-8"))
_CALL = CASES["calls"]["messages"][1]["tool_calls"][0]
_DESCRIBED = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"place": "K\u00f6ln"}}\n</tool_call>'


def _without_calls(name: str, case: str) -> list[dict[str, Any]]:
    """The messages of a conversation with its calls as text."""
    one, two = f"\n{_WRITTEN}", f"\n{_WRITTEN}\n{_WRITTEN}"
    if name == "lfm2":
        call = "weather(place='K\u00f6ln')"
        one, two = (f"\n<|tool_call_start|>[{calls}]<|tool_call_end|>" for calls in (call, f"{call}, {call}"))
    told = {
        "calls": one.lstrip(),
        "several calls": f"Let me look.{two}",
        "thoughts": f"{CASES['thoughts']['messages'][3]['content']}{one}",
    }
    found = []
    for message in CASES[case]["messages"]:
        if "tool_calls" in message:
            found.append(says("assistant", told[case]))
        elif message["role"] == "tool" and name in ("gemma3", "phi3"):  # which know no tools at all
            found.append(says("user", f"<tool_response>\n{message['content']}\n</tool_response>"))
        else:
            found.append(message)
    if name == "gemma3" and case == "several calls":  # whose roles take turns
        found[2:] = [says("user", f"{found[2]['content']}\n\n{found[3]['content']}")]
    return found


def meant(name: str, case: str) -> dict[str, Any]:
    """A conversation in the form in which a template can write all of it."""
    found, template = dict(CASES[case]), TEMPLATES[name]
    messages = list(found["messages"])
    if "tool_calls" not in template and case in ("calls", "several calls", "thoughts"):
        messages = _without_calls(name, case)
    elif name in ("llama3", "gpt-oss") and case == "several calls":  # one call at a time
        again = {"role": "assistant", "tool_calls": [_CALL]}
        messages = [messages[0], messages[1] | again, messages[2], again, messages[3]]
    elif name in ("gemma3", "mistral") and case == "roles out of turn":
        messages = [says("user", "\n\n".join(message["content"] for message in messages))]
    elif name == "mistral" and case == "thoughts":
        messages[4] = messages[4] | {"tool_call_id": "abcdefghi"}
    elif case == "more" and name not in ("gemma4", "gpt-oss"):  # which write what a developer says
        messages[0] = says("system", "x")
    if "tools" in found and name in ("gemma3", "phi3"):
        described = _DESCRIBED.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in found.pop("tools")))
        if messages[0]["role"] == "system":
            messages[0] = says("system", f"{messages[0]['content']}\n\n{described}")
        else:
            messages.insert(0, says("system", described))
    return found | {"messages": messages}


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
        name: {case: transformers_writes(template, meant(name, case)) for case in CASES}
        for name, template in TEMPLATES.items()
    }
    EXPECTED.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", "utf-8")
