"""Load a draft that reads its target's hidden states: EAGLE-3, DFlash, DSpark, an assistant of Gemma 4, or the target's
MTP layer.

Files of EAGLE-3, DFlash and DSpark differ in how they number the target's layers, which dimensions RoPE rotates
in pairs, and which of the draft's hidden states EAGLE-3 feeds back. The form that the file states, or else the usual
one, and the other forms are tried on text that the target generates; the form with the most right guesses is saved. A
wrong form costs speed and does not change the target's text.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pystaged._core import HiddenRows, Model, Session, Tokenizer, Work, run
from pystaged.loading.families import FEATURES
from pystaged.options.config import SamplingConfig
from pystaged.platform.files import cache_folder, keep, kept
from pystaged.platform.seen import SeenModel

_PROMPTS = (
    "Question: Why is the sky blue?\n\nAnswer:",
    "def fibonacci(n):\n",
    "The city of Rome was founded",
    "To solve the equation 3x + 5 = 20, first",
)
_TOKENS = 50  # that the target generates after each
_PATIENCE = 20.0  # seconds; generation stops then, with fewer tokens
_ANCHORS = 3  # tokens from one block's root to the next one's
_BETTER = 0.05  # right guesses per step by which another form must beat the usual one
_WEAK = 0.25  # share of right guesses below which a draft is hardly worth its time
# If a pass of a draft reads more than this share of its target's bytes, most of them for the head, the draft has logits
# only of so many tokens with the lowest ids, which are the commonest because BPE merged them first.
_MOST_SHARE, _COMMON = 0.2, 1 << 15
_VERSION = 1  # of what is tried
# How a form may differ from the usual one, in words.
_CHANGES = {
    "deeper": "reads the outputs of its layers, not the inputs",
    "other_pairs": "RoPE rotates other pairs than its file says",
    "other_feedback": "feeds back other hidden states than its file says",
}
_GREEDY = SamplingConfig().native


@dataclass(frozen=True, slots=True)
class Form:
    """How to read a draft's file.

    deeper: layer i means the output of layer i, from 0, not its input. other_pairs: RoPE rotates the other pairs of
    dimensions (halves or neighbours). other_feedback: EAGLE-3 feeds back its hidden states after the norm instead of
    before it, or vice versa. first: share of right guesses for the next token. second: share of right guesses for the
    token after a right guess.
    """

    deeper: bool = False
    other_pairs: bool = False
    other_feedback: bool = False
    first: float = 0.0
    second: float = 0.0


def load_features(
    path: Path, target: Model, target_path: Path, tokenizer: Tokenizer, report: Callable[[str], None]
) -> Model:
    """Load such a draft in its best form; from then on the target keeps the hidden states that the draft reads.

    Args:
        tokenizer: the target's.
        report: called with a line about the form, and with a warning about a draft that is seldom right.

    Raises:
        ModelError: the file is damaged, or the draft was made for another target.
        ValueError: the target is not on the CPU.
    """
    if target.devices:
        raise ValueError(
            f"the draft {path} reads hidden states, which targets have on the CPU only; choose the device cpu"
        )
    place, form = _place(path, target, target_path), known_form(path, target, target_path)
    draft = _load(path, target, form or Form())
    if draft.architecture not in FEATURES:
        target.tap(draft.target_layers, all_rows=not draft.borrows_cells, last_row=draft.borrows_cells)
        return draft
    if form is None:
        report(f"trying the draft {path.name} on {len(_PROMPTS) * _TOKENS} tokens of the target's own text")
        form = _best(path, target, draft, _own_texts(target, tokenizer))
        keep(place, json.dumps(asdict(form)).encode())
        report(f"the draft {path.name} is {describe(form)}")
        if form.other_pairs or form.other_feedback:
            draft = _load(path, target, form)
    if form.first < _WEAK:
        report(f"the draft {path.name} is seldom right ({form.first:.0%}); was it made for this model?")
    target.tap([layer + form.deeper for layer in draft.target_layers], all_rows=True)
    return draft


def describe(form: Form) -> str:
    """A form's shares of right guesses, and how it differs from the usual form, in words."""
    changed = [words for name, words in _CHANGES.items() if getattr(form, name)]
    found = f"right for {form.first:.0%} of next tokens, and after right ones for {form.second:.0%}"
    return f"{found} ({', '.join(changed)})" if changed else found


def known_form(path: Path, target: Model, target_path: Path) -> Form | None:
    """The form that was found for a draft and a target; None where they have not been tried."""
    found = kept(_place(path, target, target_path))
    return Form(**json.loads(found)) if found else None


def _load(path: Path, target: Model, form: Form) -> Model:
    draft = Model(
        os.fsencode(path),
        target.kernel,
        0 if target.num_few_threads < target.num_threads else target.num_threads,  # the first is automatic
        kv=target.kv,
        target=target,
        other_pairs=form.other_pairs,
        other_feedback=form.other_feedback,
    )
    if not draft.block_size and draft.weight_bytes > _MOST_SHARE * target.weight_bytes:
        draft.cut_head(_COMMON)
    return draft


def _place(path: Path, target: Model, target_path: Path) -> Path:
    """The file of the form that was found."""
    files = (SeenModel.now(each).key for each in (path, target_path))
    parts = _VERSION, target.name, target.weight_bytes, *files
    key = hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:24]
    return cache_folder() / "drafts" / f"{key}.json"


def _own_texts(target: Model, tokenizer: Tokenizer) -> list[tuple[NDArray[np.int32], int]]:
    """Prompts and what the target continues them with, int32[n] each; and the prompts' lengths."""
    prompts = [tokenizer.encode(prompt).tolist() for prompt in _PROMPTS]
    texts = [prompt.copy() for prompt in prompts]
    most = min(max(map(len, prompts)) + _TOKENS, target.max_context)
    sessions = [Session(target, most) for _ in texts]
    try:
        run([Work.read(session, text[:-1]) for session, text in zip(sessions, texts, strict=True)])
        begin = time.monotonic()
        for _ in range(most - max(map(len, prompts))):
            steps = [
                Work.verify(session, text[-1:], [-1], _GREEDY) for session, text in zip(sessions, texts, strict=True)
            ]
            for text, (_, tokens) in zip(texts, run(steps), strict=True):
                text.extend(tokens.tolist())
            if time.monotonic() - begin > _PATIENCE:
                break
    finally:
        for session in sessions:
            session.close()
    return [(np.array(text, np.int32), len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]


def _best(path: Path, target: Model, draft: Model, texts: Sequence[tuple[NDArray[np.int32], int]]) -> Form:
    """The form with the most right guesses; each of its fields is decided in turn."""

    def tried(draft: Model, form: Form) -> Form:
        target.tap([layer + form.deeper for layer in draft.target_layers], all_rows=True)
        right = np.sum([_right(target, draft, *text) for text in texts], axis=0)
        return replace(form, first=float(right[0] / max(1, right[2])), second=float(right[1] / max(1, right[0])))

    best = tried(draft, Form())
    if draft.target_layers[-1] < target.num_layers:
        best = max(best, tried(draft, replace(best, deeper=True)), key=_worth)
    changes = ["other_pairs"] if draft.block_size else ["other_pairs", "other_feedback"]
    for change in changes:
        form = replace(best, **{change: True})
        best = max(best, tried(_load(path, target, form), form), key=_worth)
    return best


def _worth(form: Form) -> float:
    """Expected right guesses of two, less a margin for each deviation from the usual form."""
    return form.first * (1 + form.second) - _BETTER * [getattr(form, name) for name in _CHANGES].count(True)


def _right(target: Model, draft: Model, tokens: NDArray[np.int32], prompt: int) -> tuple[int, int, int]:
    """Over the tokens after a text's prompt: right guesses for the next token, right guesses for the token after a
    right one, and all guesses for the next token."""
    source, session = Session(target, len(tokens)), Session(draft, len(tokens) + max(2, draft.block_size))
    count = _right_blocks if draft.block_size else _right_rows
    try:
        run([Work.read(source, tokens[:-1])])
        return count(session, draft, tokens, source.hidden, prompt)
    finally:
        source.close()
        session.close()


def _right_rows(
    session: Session, draft: Model, tokens: NDArray[np.int32], hidden: HiddenRows, prompt: int
) -> tuple[int, int, int]:
    """_right for EAGLE-3: all rows of the text in one pass, then a row after each right guess."""
    end = len(tokens) - 2  # rows whose guess the text can judge; two ahead of the hidden states
    rows = np.arange(prompt - 1, end)
    if len(rows) == 0:
        return 0, 0, 0
    judged = Work.propose(session, tokens[1 : end + 1], range(-1, end - 1), len(rows), 1, _GREEDY, hidden=hidden[:end])
    rows = rows[_named(draft, run([judged])[0][0][:, 0]) == tokens[rows + 2]]
    first, behind = len(rows), rows[rows + 3 < len(tokens)]
    if len(behind) == 0:
        return first, 0, end - prompt + 1
    states = session.hidden_of(behind)
    more = Work.propose(session, tokens[behind + 2], behind, len(behind), 1, _GREEDY, hidden=states)
    second = _named(draft, run([more])[0][0][:, 0]) == tokens[behind + 3]
    return first, int(second.sum()), end - prompt + 1


def _right_blocks(
    session: Session, draft: Model, tokens: NDArray[np.int32], hidden: HiddenRows, prompt: int
) -> tuple[int, int, int]:
    """_right for DFlash and DSpark: a block after every third token of the text."""
    first = second = tried = read = 0
    size, at = draft.block_size, 0 if draft.is_anchored else 1

    def is_right(row: int, root: int) -> bool:
        before = [int(tokens[root])] if draft.has_markov else []
        found = session.likeliest([row], before, 1)[0][:, 0]
        return bool(_named(draft, found)[0] == tokens[root + 1])

    for root in range(prompt, len(tokens) - 2, _ANCHORS):
        run([Work.read(session, tokens[read:root], hidden[read:root])])
        read = root
        block = [int(tokens[root]), *[draft.mask_token] * (size - 1)]
        run([Work.propose(session, block, range(-1, size - 1), size, 1, _GREEDY)])
        tried += 1
        if is_right(at, root):
            first += 1
            second += at + 1 < size and is_right(at + 1, root + 1)
        session.discard()
    return first, second, tried


def _named(draft: Model, rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Token ids of rows of a draft's head."""
    return draft.head_tokens[rows] if len(draft.head_tokens) else rows
