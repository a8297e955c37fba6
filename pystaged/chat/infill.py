"""The prompt by which a model fills in the middle of a text."""

from __future__ import annotations

from collections.abc import Sequence

from pystaged._core import Tokenizer

Files = Sequence[tuple[str, str]]
"""Names and texts of related files, the most important one last."""
_WINDOW = 2048  # most tokens around the gap, a quarter of them after it, as in llama-server


def infill_prompt(
    tokenizer: Tokenizer, prefix: str, suffix: str, *, begun: str, files: Files, n_ctx: int, max_tokens: int
) -> list[int]:
    """The tokens of a prompt for the text between prefix and suffix, as llama-server makes them: what is furthest from
    the gap is left out if it does not fit. Control tokens spelled in the texts are text. Raises ValueError where the
    vocabulary has no tokens for this.

    Args:
        begun: beginning of the new text.
        max_tokens: most tokens of the new text.
    """
    marks = tokenizer.infill_tokens
    missing = [name for name in ("prefix", "suffix", "middle") if name not in marks]
    if missing:
        raise ValueError(
            f"this model cannot fill in text: its vocabulary has no token for {' and '.join(missing)}; use a model "
            "that can, such as Qwen2.5-Coder"
        )

    def encoded(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special=False, parse_special=False).tolist()
        return tokens

    related = [marks["repository"], *encoded("myproject\n")] if "repository" in marks else []
    for name, text in files:
        related += [marks["file"], *encoded(f"{name}\n")] if "file" in marks else encoded("\n\n--- snippet ---\n\n")
        related += encoded(text)
    if "file" in marks:
        related += [marks["file"], *encoded("filename\n")]
    window = min(_WINDOW, max(n_ctx - max_tokens, n_ctx // 2))
    quarter, new = max(1, window // 4), encoded(begun)
    kept = min(len(related), max(0, n_ctx - window - 2 * max_tokens))
    return [
        *related[len(related) - kept :],
        *([tokenizer.bos] if tokenizer.adds_bos else []),
        marks["prefix"],
        *encoded(prefix)[-3 * quarter :],
        *new,
        marks["suffix"],
        *encoded(suffix)[: max(0, quarter - 2 - len(new))],
        marks["middle"],
    ]
