"""Every option once: its name, type, default, range and help.

Configs are checked against these tables; the options of the command line, the members of the server's requests, the
plugin for `llm` and the tables in docs/usage.md are made from them. Nothing that computes is imported here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

MOST_LOGPROBS = 100  # likeliest tokens of each position, which are Python objects; others allow 20
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's

_MOST = 2**31 - 1
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}


@dataclass(frozen=True, slots=True)
class Option:
    """An option.

    default: where it is not given.
    help: one or two sentences.
    ge, gt, le, lt: bounds of its value, as pydantic calls them.
    flags: how the command line spells it; None for two dashes and its name, () where it has none.
    type: of its value.
    """

    default: Any
    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    flags: tuple[str, ...] | None = None
    type: Any = None

    @property
    def kind(self) -> type | None:
        """Of float, int and bool the one that its value is, None where it is something else."""
        kinds = [each for each in get_args(self.type) or (self.type,) if each is not type(None)]
        return kinds[0] if kinds[0] in (float, int, bool) and len(kinds) == 1 else None

    @property
    def bounds(self) -> dict[str, float]:
        """Those there are, by name."""
        return {name: getattr(self, name) for name in _BOUNDS if getattr(self, name) is not None}

    @property
    def range(self) -> str:
        """The same in words, such as "above 0 and at most 1", without what no integer of 32 bits is beyond."""
        bounds = {name: _word(bound) for name, bound in self.bounds.items() if bound != _MOST}
        if bounds.keys() == {"ge", "le"}:
            return f"between {bounds['ge']} and {bounds['le']}"
        names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        return " and ".join(f"{names[name]} {bound}" for name, bound in bounds.items())

    def check_range(self, name: str, value: float) -> None:
        """Raise ValueError for a value that is out of range."""
        for bound, limit in self.bounds.items():
            if not _BOUNDS[bound](value, limit):
                words = f"at most {_word(limit)}" if limit == _MOST else self.range
                raise ValueError(f"{name} must be {words}, not {value}")


def _word(bound: float) -> str:
    bits = int(bound).bit_length()
    return f"2**{bits} - 1" if bits > 30 and bound == 2**bits - 1 else f"{bound:g}"


# fmt: off
class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen. The rules are llama.cpp's; by default all are off."""

    temperature: Annotated[float, Option(0.0, ge=0, help=
        "Divide logits by this before sampling; 0 always takes the likeliest token.")]
    top_k: Annotated[int, Option(0, "Keep this many of the likeliest tokens; 0 keeps all.", ge=0, le=_MOST)]
    top_p: Annotated[float, Option(1.0, gt=0, le=1, help=
        "Keep the fewest tokens that have this probability together; 1 keeps all.")]
    min_p: Annotated[float, Option(0.0, ge=0, lt=1, help=
        "Keep tokens at least this likely relative to the likeliest; 0 keeps all.")]
    seed: Annotated[int | None, Option(0, ge=0, le=2**64 - 1, help=
        "The same prompt, options and seed give the same text. -1 (in Python None) draws one.")]
    typical_p: Annotated[float, Option(1.0, gt=0, le=1, help=
        "Keep the fewest tokens that have more than this probability together, those first whose surprise, -log p, "
        "is nearest to its mean; 1 keeps all.")]
    xtc_probability: Annotated[float, Option(0.0, ge=0, le=1, help=
        "How often XTC excludes all top choices but the least likely one; 0 is never.")]
    xtc_threshold: Annotated[float, Option(0.1, ge=0, le=1, help=
        "Probability from which XTC counts a token as a top choice; above 0.5 it is off.")]
    temperature_last: Annotated[bool, Option(False, "Apply the temperature after all filters, as llama.cpp does.")]
    repeat_penalty: Annotated[float, Option(1.0, gt=0, help=
        "Divide positive logits of tokens that the text has already by this, and multiply negative ones; 1 is off.")]
    presence_penalty: Annotated[float, Option(0.0, help=
        "Subtract this from the logits of tokens that the text has already; 0 is off.")]
    frequency_penalty: Annotated[float, Option(0.0, help=
        "Subtract this from a token's logit for each time that the text has it; 0 is off.")]
    repeat_last_n: Annotated[int, Option(64, ge=-1, le=_MOST, help=
        "Tokens that these three penalties look back, those of the prompt included; -1 for all, 0 for none.")]
    dry_multiplier: Annotated[float, Option(0.0, ge=0, help=
        "DRY: subtract dry_multiplier * dry_base ** (n - dry_allowed_length) from the logit of a token that would "
        "continue a repetition of n tokens; 0 is off.")]
    dry_base: Annotated[float, Option(1.75, "Factor by which each repeated token raises DRY's penalty.", ge=1)]
    dry_allowed_length: Annotated[int, Option(2, ge=0, le=_MOST, help=
        "Tokens of the shortest repetition that DRY penalizes.")]
    dry_penalty_last_n: Annotated[int, Option(-1, ge=-1, le=_MOST, help=
        "Tokens that DRY looks back, those of the prompt included; -1 for all, 0 for none.")]
    dry_sequence_breakers: Annotated[str | Sequence[str], Option(
        DRY_SEQUENCE_BREAKERS, flags=("--dry-sequence-breaker",), help=
        "Texts that no repetition goes beyond; 40 characters each, 640 in all.")]
    logit_bias: Annotated[Mapping[int | str, float] | None, Option(None, flags=("--logit-bias", "-l"), help=
        "Numbers to add to the logits of tokens, each named by its id or by a text that is one token; -inf "
        "excludes a token.")]
    min_tokens: Annotated[int, Option(0, ge=0, le=_MOST, help=
        "New tokens before which the model may not end the text; stop strings may.")]
    ignore_eos: Annotated[bool, Option(False, "Never let the model end the text.")]


class TextFields(SamplingOptions, total=False):
    """What a generation may be told as data."""

    max_tokens: Annotated[int, Option(128, "New tokens at most.", ge=1, flags=("--max-tokens", "-n"))]
    stop: Annotated[str | Sequence[str], Option((), help=
        "End the text before this string, or one of several, appears in it; 65,536 characters in all.")]
    stop_loops: Annotated[bool, Option(False, flags=("--stop-loops/--no-stop-loops",), help=
        "End a text that repeats itself: whose last tokens are one span of 1 to 512 tokens, three times or more, "
        "128 tokens or more in all. Its finish_reason is then 'loop'.")]
    json_schema: Annotated[Mapping[str, Any] | str | None, Option(None, help=
        'The text is JSON that meets this schema. Needs the extra "grammar".')]
    regex: Annotated[str | None, Option(None, "The text matches this regular expression.")]
    grammar: Annotated[str | None, Option(None, "The text follows this grammar, in Lark's or llama.cpp's notation.")]
    speculate: Annotated[bool, Option(True, flags=("--speculate/--no-speculate",), help=
        "Draft tokens and verify them; without, the text is the same, only slower.")]
    logprobs: Annotated[int | None, Option(None, ge=0, le=MOST_LOGPROBS, help=
        "Report the log-probability of each token, of unfiltered logits at temperature 1, and those of this many of "
        "the likeliest tokens at its position.")]
    prompt_logprobs: Annotated[int | None, Option(None, ge=0, le=MOST_LOGPROBS, flags=(), help=
        "Report of each token of the prompt what logprobs reports of new ones; the prompt is then evaluated anew.")]
    reuse: Annotated[bool, Option(True, flags=(), help=
        "Reuse keys and values that other texts have left of the prompt; the text is the same.")]
    prediction: Annotated[str | Sequence[int], Option((), flags=(), help=
        "Text or token ids that the text will largely repeat, to draft from; the text is the same.")]


class LoadFields(TypedDict, total=False):
    """What drafts for a model, and where and how both run."""

    draft: Annotated[str | Path | None, Option("auto", help=
        "Draft model with the same vocabulary, or draft head: a path or name. none: n-grams alone draft; auto: the "
        "draft that belongs to the model, where there is one.")]
    ngrams: Annotated[str | Path | None, Option(None, help=
        "File of an n-gram table that drafts; by default the one beside the draft's file.")]
    device: Annotated[str, Option("cpu", help=
        "Device of the model: cpu, metal, gpu, auto, rpc:HOST:PORT,..., or a name that info shows.")]
    draft_device: Annotated[str, Option("cpu", "Device of the draft, likewise.")]
    n_ctx: Annotated[int, Option(0, ge=0, le=_MOST, flags=("--n-ctx", "-c"), help=
        "Tokens of a context, prompt and text together; 0 for what the model was trained for, 8192 at most.")]
    kv: Annotated[str, Option("f16", help=
        "Type of keys and values: f16, or q8_0 for half the memory and slightly different texts.")]
    num_threads: Annotated[int, Option(0, ge=0, le=_MOST, flags=("--threads",), help=
        "Threads; 0 for one per physical core.")]
    weight_cache: Annotated[bool, Option(False, help=
        "Keep packed weights in the cache folder, as many bytes as the model, to load at once from then on.")]
    recycle: Annotated[bool, Option(True, flags=("--recycle/--no-recycle",), help=
        "Draft from recycled candidates, the likely tokens of earlier texts, too; the cache folder keeps them, 10 MB "
        "at most.")]
    kv_memory: Annotated[int | None, Option(None, ge=1, help=
        "Bytes for the keys and values of all texts, on the command line also as 2G; by default a quarter of what "
        "is free. One text alone always fits.")]

# fmt: on


def table(fields: Any) -> dict[str, Option]:
    """The options of one of these classes, by name."""
    hints = get_type_hints(fields, include_extras=True)
    return {name: replace(hint.__metadata__[0], type=hint.__origin__) for name, hint in hints.items()}


SAMPLING = table(SamplingOptions)
TEXT = {name: option for name, option in table(TextFields).items() if name not in SAMPLING}
LOADING = table(LoadFields)
ALL = SAMPLING | TEXT | LOADING


def flags(name: str, option: Option) -> tuple[str, ...]:
    """How the command line spells an option."""
    return (f"--{name.replace('_', '-')}",) if option.flags is None else option.flags


def documented() -> str:
    """The tables in docs/usage.md."""
    lines: list[str] = []
    for heading, options in (("sampling", SAMPLING), ("text", TEXT), ("loading", LOADING)):
        lines += [f"| {heading} | command line | default | range | |", "|---|---|---|---|---|"]
        for name, option in options.items():
            spelled = ", ".join(f"`{flag}`" for flag in flags(name, option))
            texts = option.default if isinstance(option.default, tuple) else [option.default]
            default = " ".join("`" + repr(each).replace("'", "") + "`" for each in texts)
            words = option.help.replace("*", "\\*")
            lines.append(f"| `{name}` | {spelled} | {default} | {option.range.replace('**', '^')} | {words} |")
        lines.append("")
    return "\n".join(lines)
