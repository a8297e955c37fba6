"""Texts kept beside tests: comparing one with a new text, and saying what differs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pystaged.files import read_small, whole_file

FORMAT = "pystaged text 1"
_MOST_BYTES = 64_000_000
_AROUND = 30  # characters of a text shown on both sides of a difference


def check(
    text: str,
    file: Path,
    *,
    update: Callable[[], object] | None,
    receipt: Callable[[], dict[str, Any] | None],
    ask: Callable[..., Any],
    shown: str,
) -> str:
    """Compare a text with the one kept in a file, or keep it.

    Args:
        update: keep the text if it differs or none is kept, and then call this; None only compares.
        receipt: called for the text's receipt as JSON values, None if it has none.
        ask: the method of SharedServer.
        shown: the file's name in messages.

    Returns:
        What differs, "" if the texts are the same.
    """
    try:
        kept = _read(file)
    except ValueError:
        if not update:
            return (
                f"{shown} is not a kept text (damaged, or a merge conflict?); overwrite it with pytest "
                f"--pystaged-update:\n{text}"
            )
        kept = None
    if kept is not None and kept["text"] == text:
        return ""
    now = receipt()
    if update:
        scored = now and ask("score", before=now["prompt"]["tokens"], tokens=now["text"]["tokens"])["logprobs"]
        # Few digits, as they are for reading and no test compares them.
        logprobs = [round(each, 4) for each in scored or []]
        values = {"format": FORMAT, "text": text, "logprobs": logprobs, "receipt": now}
        content = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as part:
            part.write_text(f"{{\n{content}\n}}\n", "utf-8", newline="\n")
        update()
        return ""
    if kept is None:
        return f"no text is kept in {shown} yet; if this one is right, keep it with pytest --pystaged-update:\n{text}"
    lines = [f"the text differs from the one in {shown}", *_first_token(kept, now, ask)]
    at = next((i for i, (a, b) in enumerate(zip(kept["text"], text, strict=False)) if a != b), None)
    at = min(len(kept["text"]), len(text)) if at is None else at
    lines += [
        f"  then: {_around(kept['text'], at)}",
        f"  now:  {_around(text, at)}",
        f"  {_reason(kept['receipt'], now)}",
    ]
    return "\n".join([*lines, "  If the new text is right, keep it with pytest --pystaged-update."])


def text_of(path: Path) -> tuple[str, bool] | None:
    """The text of a file that `check` kept, and whether it has a receipt; None for any other file."""
    with suppress(OSError, ValueError):
        if kept := _read(path):
            return kept["text"], kept["receipt"] is not None
    return None


def _read(file: Path) -> dict[str, Any] | None:
    """The kept text in a file; None where there is no file. Raises ValueError for another file."""
    try:
        kept = json.loads(read_small(file, _MOST_BYTES))
        if kept["format"] == FORMAT and isinstance(kept["text"], str):
            _ = kept["logprobs"], kept["receipt"] and kept["receipt"]["text"]["tokens"]
            return dict(kept)
    except FileNotFoundError:
        return None
    except (TypeError, KeyError, RecursionError):
        pass
    raise ValueError("no kept text")


def _around(text: str, at: int) -> str:
    first, last = max(0, at - _AROUND), at + _AROUND
    return f"{'...' * (first > 0)}{text[first:last]!r}{'...' * (last < len(text))}"


def _first_token(then: dict[str, Any], now: dict[str, Any] | None, ask: Callable[..., Any]) -> list[str]:
    """A line on the first token that differs; none if the texts cannot be compared by tokens."""
    old = then["receipt"]
    if not old or not now or old["vocabulary"] != now["vocabulary"]:
        return []
    before, after = old["text"]["tokens"], now["text"]["tokens"]
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    context = now["prompt"]["tokens"] + after[:at]
    spelled = []
    for tokens, logprobs in ((before, then["logprobs"]), (after, [])):
        if at == len(tokens):
            spelled.append("the end")
            continue
        found = ask("score", before=context, tokens=[tokens[at]])
        earlier = f"{_probability(logprobs[at])} then, " if at < len(logprobs) else ""
        spelled.append(f"{found['pieces'][0]!r} (probability {earlier}{_probability(found['logprobs'][0])} now)")
    if spelled[0] == spelled[1]:
        return []
    return [f"  token {at + 1} was {spelled[0]} and is {spelled[1]}"]


def _probability(logprob: float) -> str:
    return f"{math.exp(logprob):.2g}"


def _reason(then: dict[str, Any] | None, now: dict[str, Any] | None) -> str:
    """A sentence on what differs of what a text depends on."""
    if not then or not now:
        which = "neither text has a" if not then and not now else f"the {'new' if then else 'kept'} text has no"
        return (
            f"Model, prompt and options cannot be compared: {which} receipt, because the model did not write exactly "
            "that string."
        )
    found = []
    if then["model"]["sha256"] != now["model"]["sha256"]:
        files = [f"{each['model']['file']} with SHA-256 {each['model']['sha256'][:12]}..." for each in (then, now)]
        found.append(f"the model's file ({files[0]} then, {files[1]} now)")
    old, new = then["prompt"]["tokens"], now["prompt"]["tokens"]
    if old != new:
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        found.append(f"the prompt ({len(old)} tokens then, {len(new)} now, the first {same} are the same)")
    for name, given in (("kv", "the KV cache's type"), ("n_ctx", "the context length"), ("device", "the device")):
        if then[name] != now[name]:
            found.append(f"{given} ({then[name]} then, {now[name]} now)")
    ours, theirs = _flat(now["options"]), _flat(then["options"])
    for name in sorted(ours.keys() | theirs.keys()):
        if theirs.get(name) != ours.get(name):
            found.append(f"{name} ({json.dumps(theirs.get(name))} then, {json.dumps(ours.get(name))} now)")
    if then["arithmetic"] != now["arithmetic"] or (not found and then["versions"] != now["versions"]):
        said = [", ".join(f"{name} {version}" for name, version in each["versions"].items()) for each in (then, now)]
        found.append(
            f"the version ({said[0]}, arithmetic {then['arithmetic']} then; {said[1]}, {now['arithmetic']} now)"
        )
    if found:
        return f"What differs: {'; '.join(found)}."
    if then["text"] == now["text"]:
        return "The model wrote the same text. What the application makes of it has changed, or the file was edited."
    return (
        "Model, prompt, options and versions are the same, so the file was edited, or this is an error of pystaged; "
        "`pystaged verify` of the file tells which."
    )


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for each in (options, options["sampling"]) for name, value in each.items() if name != "sampling"
    }
