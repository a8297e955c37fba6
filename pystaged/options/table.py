"""All options of loading and of a generation, each declared once: name, type, default, range and help.

These declarations are the typed keywords of `load` and `generate`. The tables made from them check values, and generate
the options of the command line, the fields of the server's requests, the options of the `llm` plugin and the tables in
docs/usage.md. To load fast, this module does not import the compiled one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypedDict, get_args, get_origin, get_type_hints

MOST_LOGPROBS = 100  # likeliest tokens per position; limited because each is a Python object
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
PREFILL_BUDGET = 0.25  # seconds

_MOST = 2**31 - 1
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {name: getattr(operator, name) for name in ("ge", "gt", "le", "lt")}
# What to write for -1 and None, which have a meaning in other programs.
INSTEAD = {"max_tokens": "; engine.n_ctx has no limit but the context", "seed": "; None draws a random seed"}


@dataclass(frozen=True)
class Option:
    """An option.

    default: value if it is not given.
    help: one or two sentences.
    ge, gt, le, lt: bounds of its value, with pydantic's names.
    flags: its spellings on the command line; None for two dashes and its name, () for none.
    type: type of its value.
    """

    default: Any
    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    flags: tuple[str, ...] | None = None
    type: Any = None

    @cached_property
    def kind(self) -> Any:
        """What its value is: bool, int, float, str, Path for a name or a path, or Callable; else None."""
        kinds = [get_origin(each) or each for each in get_args(self.type) or (self.type,) if each is not NoneType]
        kind = Path if kinds == [str, Path] else kinds[0] if len(kinds) == 1 else None
        return kind if kind in (bool, int, float, str, Path, Callable) else None

    @property
    def plain(self) -> Any:
        """The type of its value where that comes as a word or in JSON: bool, int, float, else str."""
        return self.kind if self.kind in (bool, int, float) else str

    @cached_property
    def allows_none(self) -> bool:
        """Whether None is a value."""
        return NoneType in get_args(self.type)

    @cached_property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by name."""
        return {name: getattr(self, name) for name in _BOUNDS if getattr(self, name) is not None}

    @property
    def range(self) -> str:
        """The bounds in words, such as "above 0 and at most 1", without the upper bound 2**31 - 1."""
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
                raise ValueError(f"{name} must be {words}, not {value}{INSTEAD.get(name, '') * (value == -1)}")


def _word(bound: float) -> str:
    bits = int(bound).bit_length()
    return f"2**{bits} - 1" if bits > 30 and bound == 2**bits - 1 else f"{bound:g}"


# fmt: off
class FilterOptions(TypedDict, total=False):
    """Options of sampling that choose among logits."""

    temperature: Annotated[float, Option(0.0, ge=0, help=
        "Divide logits by this before sampling; 0 always takes the likeliest token.")]
    top_k: Annotated[int, Option(0, "Keep this many of the likeliest tokens; 0 keeps all.", ge=0, le=_MOST)]
    top_p: Annotated[float, Option(1.0, gt=0, le=1, help=
        "Keep the smallest set of likeliest tokens whose total probability reaches this; 1 keeps all.")]
    min_p: Annotated[float, Option(0.0, ge=0, lt=1, help=
        "Keep tokens at least this likely relative to the likeliest; 0 keeps all.")]
    seed: Annotated[int | None, Option(0, ge=0, le=2**64 - 1, help=
        "The same prompt, options and seed give the same text. -1 (in Python None) draws a random seed.")]
    typical_p: Annotated[float, Option(1.0, gt=0, le=1, help=
        "Keep the smallest set of tokens whose surprise, -log p, is nearest to its mean and whose total probability "
        "exceeds this; 1 keeps all.")]
    xtc_probability: Annotated[float, Option(0.0, ge=0, le=1, help=
        "Probability that XTC, at a position, excludes all top choices but the least likely one; 0 is off.")]
    xtc_threshold: Annotated[float, Option(0.1, ge=0, le=1, help=
        "Probability from which XTC counts a token as a top choice; above 0.5 it is off.")]
    temperature_last: Annotated[bool, Option(False, "Apply the temperature after all filters, as llama.cpp does.")]


class PenaltyOptions(FilterOptions, total=False):
    """Options of sampling that change logits by earlier tokens, too."""

    repeat_penalty: Annotated[float, Option(1.0, gt=0, help=
        "Divide positive logits of tokens that occurred before by this, and multiply negative ones; 1 is off.")]
    presence_penalty: Annotated[float, Option(0.0, help=
        "Subtract this from the logits of tokens that occurred before; 0 is off.")]
    frequency_penalty: Annotated[float, Option(0.0, help=
        "Subtract this from a token's logit for each time that it occurred before; 0 is off.")]
    repeat_last_n: Annotated[int, Option(64, ge=-1, le=_MOST, help=
        "Number of last tokens, prompt included, that these three penalties apply to; -1 for all, 0 for none.")]
    dry_multiplier: Annotated[float, Option(0.0, ge=0, help=
        "DRY: subtract dry_multiplier * dry_base ** (n - dry_allowed_length) from the logit of a token that would "
        "continue a repetition of n tokens; 0 is off.")]
    dry_base: Annotated[float, Option(1.75, "Factor by which each repeated token raises DRY's penalty.", ge=1)]
    dry_allowed_length: Annotated[int, Option(2, ge=0, le=_MOST, help=
        "Tokens of the shortest repetition that DRY penalizes.")]
    dry_penalty_last_n: Annotated[int, Option(-1, ge=-1, le=_MOST, help=
        "Number of last tokens, prompt included, that DRY searches for repetitions; -1 for all, 0 for none.")]


class SamplingOptions(PenaltyOptions, total=False):
    """Options of sampling, which work as in llama.cpp; by default all are off."""

    dry_sequence_breakers: Annotated[str | Sequence[str], Option(
        DRY_SEQUENCE_BREAKERS, flags=("--dry-sequence-breaker",), help=
        "Strings at which a repetition ends for DRY; at most 40 characters each, 640 in all.")]
    logit_bias: Annotated[Mapping[int | str, float] | None, Option(None, flags=("--logit-bias", "-l"), help=
        "Numbers to add to the logits of tokens, each given by its id or by a string that is one token; -inf "
        "excludes a token.")]
    min_tokens: Annotated[int, Option(0, ge=0, le=_MOST, help=
        "Minimum number of new tokens before the model may end the text; a stop string may end it earlier.")]
    ignore_eos: Annotated[bool, Option(False, "Never let the model end the text.")]


class TextFields(SamplingOptions, total=False):
    """Options of a generation that are plain data."""

    max_tokens: Annotated[int, Option(128, "Maximum number of new tokens.", ge=1, flags=("--max-tokens", "-n"))]
    stop: Annotated[str | Sequence[str], Option((), help=
        "String or strings that end the text and are not part of it; at most 65,536 characters in all.")]
    stop_loops: Annotated[bool, Option(False, flags=("--stop-loops/--no-stop-loops",), help=
        "End a text whose last tokens repeat one span of 1 to 512 tokens at least three times, over at least 128 "
        "tokens in all. Its finish_reason is then 'loop'.")]
    json_schema: Annotated[Mapping[str, Any] | str | None, Option(None, help=
        'The text is JSON that meets this schema. Needs the extra "grammar".')]
    regex: Annotated[str | None, Option(None, "The text matches this regular expression.")]
    grammar: Annotated[str | None, Option(None, "The text follows this grammar, in Lark's or llama.cpp's notation.")]
    speculate: Annotated[bool, Option(True, flags=("--speculate/--no-speculate",), help=
        "Use speculative decoding; without it the text is the same, but slower.")]
    logprobs: Annotated[int | None, Option(None, ge=0, le=MOST_LOGPROBS, help=
        "Report the log-probability of each token, from unfiltered logits at temperature 1, and those of this many "
        "of the likeliest tokens at its position.")]
    prompt_logprobs: Annotated[int | None, Option(None, ge=0, le=MOST_LOGPROBS, flags=(), help=
        "Report log-probabilities, as `logprobs` does, for each token of the prompt, which is then prefilled in full.")]
    prompt_logprobs_start: Annotated[int, Option(0, ge=0, le=_MOST, flags=(), help=
        "Index of the first prompt token with a log-probability; KV caches of the tokens before may be reused.")]
    reuse: Annotated[bool, Option(True, flags=(), help=
        "Reuse the KV cache of other texts that begin like the prompt; the text is the same.")]
    prediction: Annotated[str | Sequence[int], Option((), flags=(), help=
        "Expected text or token ids, to draft from; the text is the same.")]
    progress: Annotated[Callable[[int, int], object] | None, Option(None, flags=(), help=
        "Function that is called during prefill with the tokens that are done and the tokens in all, before the first "
        "piece of a few hundred and after each; in the thread that reads the stream.")]


class LoadFields(TypedDict, total=False):
    """Options of loading: the drafter, and where and how model and draft run."""

    draft: Annotated[str | Path | None, Option("auto", help=
        "Draft made for the model, or a model with nearly the same vocabulary: a path or name. none: draft by n-grams "
        "alone; auto: the model's own draft, or a downloaded one that `info` recommends.")]
    ngrams: Annotated[str | Path | None, Option(None, help=
        "File of an n-gram table to draft from; by default the one beside the draft's file.")]
    device: Annotated[str, Option("cpu", help=
        "Device of the model: cpu, metal, gpu, auto, rpc:HOST:PORT,..., or a name that info shows.")]
    draft_device: Annotated[str, Option("cpu", "Device of the draft, with the same values.")]
    n_ctx: Annotated[int, Option(0, ge=0, le=_MOST, flags=("--n-ctx", "-c"), help=
        "Context length in tokens of prompt and new text, the last aside; 0 for the model's own, but at most 8192.")]
    kv: Annotated[str, Option("f16", help=
        "Type of the KV cache: f16, or q8_0 for half the memory and slightly different texts.")]
    num_threads: Annotated[int, Option(0, ge=0, le=_MOST, flags=("--threads",), help=
        "Number of threads; 0 for as many as the machine's cores allow, which `info` shows.")]
    weight_cache: Annotated[bool, Option(False, help=
        "Save packed weights in the cache folder, about as large as the model, to load faster from then on.")]
    recycle: Annotated[bool, Option(True, flags=("--recycle/--no-recycle",), help=
        "Draft from recycled candidates, the likely tokens of earlier texts, too; the cache folder keeps at most "
        "10 MB of them.")]
    kv_memory: Annotated[int | None, Option(None, ge=1, help=
        "Bytes for the KV caches and recurrent states of all texts, on the command line also as 2G; by default a "
        "quarter of the free memory. One text alone always fits.")]
    prompt_cache: Annotated[str | Path | None, Option(None, help=
        "Folder in which ended texts are kept with their KV caches, for prompts that begin like them, also after a "
        "restart; auto: one in the cache folder.")]
    prompt_cache_size: Annotated[int, Option(8 << 30, ge=1, help=
        "Maximum size of this folder in bytes, on the command line also as 2G; texts used longest ago are removed "
        "first.")]
    long_context: Annotated[bool, Option(False, flags=(), help=
        "With n_ctx 0, take up to 32768, 16384 or 8192 tokens, the most that fit into kv_memory or a quarter of the "
        "free memory; on the CPU only. The server does so.")]
    prefill_budget: Annotated[float, Option(PREFILL_BUDGET, ge=0, flags=(), help=
        "Longest time in seconds of a pass that decodes and prefills; each such pass prefills at least 8 tokens.")]
    report: Annotated[Callable[[str], None] | None, Option(None, flags=(), help=
        "Function that is called with a line of text before something that takes a while, such as comparing devices.")]

# fmt: on


def table(fields: Any) -> dict[str, Option]:
    """The options of one of these classes, by name."""
    hints = get_type_hints(fields, include_extras=True)
    return {name: replace(hint.__metadata__[0], type=hint.__origin__) for name, hint in hints.items()}


def declared(default: Any, help: str, **more: Any) -> Any:
    """A field of a dataclass that is an option of a command, too; arguments as in Option."""
    return field(default=default, metadata={"option": Option(default, help, **more)})


def declared_in(kind: type[Any]) -> dict[str, Option]:
    """These options of a dataclass, by name."""
    types = get_type_hints(kind)
    return {own.name: replace(own.metadata["option"], type=types[own.name]) for own in fields(kind) if own.metadata}


SAMPLING = table(SamplingOptions)
TEXT = {name: option for name, option in table(TextFields).items() if name not in SAMPLING}
LOADING = table(LoadFields)
ALL = SAMPLING | TEXT | LOADING


def described(options: Mapping[str, Option]) -> str:
    """Docstring lines for options."""
    lines = (f"    {name}: {option.help} Default: {option.default!r}." for name, option in options.items())
    return "\n".join(lines)


def flags(name: str, option: Option) -> tuple[str, ...]:
    """Spellings of an option on the command line."""
    return (f"--{name.replace('_', '-')}",) if option.flags is None else option.flags
