"""Draft models of a target: those that are known on Hugging Face's hub, and what differs between the vocabularies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pystaged._core import Tokenizer
from pystaged.loading import cache
from pystaged.loading.metadata import depth_and_width, predicts_ahead, reads_target

_LEAST_SHARED = 0.9  # share of the target's token ids that must mean the same in the draft


class Targets(NamedTuple):
    """Targets that a draft is made for: of an architecture and a pre-tokenizer (`tokenizer.ggml.pre`), and all that are
    wider than the draft, or, if it reads their hidden states, those of one shape.

    Args:
        width: the draft's; the targets', where `layers` is given.
        layers: the targets' number of layers, for a draft that reads hidden states.
        called: what a target's name must contain, as lower-case letters and digits only.
    """

    architecture: str
    pre_tokenizer: str
    width: int
    layers: int = 0
    called: str = ""


# Names on the hub; of drafts that read hidden states DSpark, DFlash and EAGLE-3, in this order: more of a block's
# guesses are right, and it costs one pass.
KNOWN: dict[Targets, tuple[str, ...]] = {
    Targets("qwen3", "qwen2", 2048, 28): ("AngelSlim/Qwen3-1.7B_eagle3",),
    Targets("qwen3", "qwen2", 2560, 36): (
        "deepseek-ai/dspark_qwen3_4b_block7",
        "z-lab/Qwen3-4B-DFlash-b16",
        "deepseek-ai/dflash_qwen3_4b_block7",
        "AngelSlim/Qwen3-4B_eagle3",
        "deepseek-ai/eagle3_qwen3_4b_ttt7",
    ),
    Targets("qwen3", "qwen2", 4096, 36): (
        "deepseek-ai/dspark_qwen3_8b_block7",
        "z-lab/Qwen3-8B-DFlash-b16",
        "RedHatAI/Qwen3-8B-speculator.dflash",
        "deepseek-ai/dflash_qwen3_8b_block7",
        "RedHatAI/Qwen3-8B-speculator.eagle3",
        "AngelSlim/Qwen3-8B_eagle3",
        "deepseek-ai/eagle3_qwen3_8b_ttt7",
        "Tengyunw/qwen3_8b_eagle3",
    ),
    Targets("qwen3", "qwen2", 5120, 40): (
        "deepseek-ai/dspark_qwen3_14b_block7",
        "deepseek-ai/dflash_qwen3_14b_block7",
        "RedHatAI/Qwen3-14B-speculator.eagle3",
        "AngelSlim/Qwen3-14B_eagle3",
        "deepseek-ai/eagle3_qwen3_14b_ttt7",
    ),
    Targets("qwen3", "qwen2", 5120, 64): ("RedHatAI/Qwen3-32B-speculator.eagle3", "AngelSlim/Qwen3-32B_eagle3"),
    Targets("llama", "llama-bpe", 4096, 32, "llama318b"): (
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    ),
    Targets("llama", "llama-bpe", 4096, 32, "r1distillllama8b"): ("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",),
    Targets("llama", "llama-bpe", 8192, 80, "llama3370b"): (
        "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
        "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-Specforge",
        "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
    ),
    Targets("llama", "minicpm5", 2048, 42): ("openbmb/MiniCPM5-2B-DSpark", "openbmb/MiniCPM5-2B-DSpark-GGUF"),
    Targets("lfm2", "lfm2", 2048, 16, "lfm2512binstruct"): (
        "LiquidAI/LFM2.5-1.2B-Instruct-DSpark",
        "LiquidAI/LFM2.5-1.2B-Instruct-DSpark-GGUF",
    ),
    Targets("lfm2", "lfm2", 2048, 30): ("LiquidAI/LFM2.5-2.6B-DSpark",),
    Targets("lfm2moe", "lfm2", 2048, 24, "lfm258ba1b"): ("LiquidAI/LFM2.5-8B-A1B-DSpark",),
    # Parallel drafts (PARD), each trained for all targets of its family.
    Targets("llama", "llama-bpe", 2048): ("amd/PARD-Llama-3.2-1B",),
    Targets("qwen2", "qwen2", 896): ("amd/PARD-Qwen2.5-0.5B",),
    Targets("qwen2", "deepseek-r1-qwen", 1536): ("amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B",),
    Targets("qwen3", "qwen2", 1024): ("amd/PARD-Qwen3-0.6B",),
}


def known_drafts(metadata: Mapping[str, str], *, on_cpu: bool = True) -> list[str]:
    """The names on the hub of the drafts for a target, by its file's metadata, the most promising first. on_cpu:
    whether it runs on the CPU, which drafts that read hidden states need."""
    family = metadata.get("general.architecture", ""), metadata.get("tokenizer.ggml.pre")
    layers, width = depth_and_width(metadata)
    name = re.sub(r"[^a-z0-9]", "", metadata.get("general.name", "").lower())

    def fits(targets: Targets) -> bool:
        if targets.layers:
            return on_cpu and (width, layers) == (targets.width, targets.layers) and targets.called in name
        return layers > 0 and width > targets.width

    return [draft for targets, drafts in KNOWN.items() if family == targets[:2] and fits(targets) for draft in drafts]


def own_layer(model: Path, tokenizer: Tokenizer) -> Path | None:
    """A model's file if it has an MTP layer, which drafts for the model; else None. tokenizer: the model's, with its
    file's metadata."""
    return model if predicts_ahead(tokenizer.metadata, tokenizer.metadata) else None


def cached_drafts(
    tokenizer: Tokenizer, report: Callable[[str], None] = lambda _: None, *, on_cpu: bool = True
) -> Iterator[Path]:
    """The files of those that are in the cache, the best first; they are not opened. tokenizer: the target's, with its
    file's metadata; report: called with a line about a draft that cannot be used; on_cpu: as in known_drafts."""
    for draft in known_drafts(tokenizer.metadata, on_cpu=on_cpu):
        try:
            if found := cache.find(draft):
                yield found
        except ValueError as error:  # there are several
            report(f"passed over: the draft {draft}: {error}")


def find_draft(tokenizer: Tokenizer, report: Callable[[str], None] = lambda _: None) -> Path | None:
    """The first of them that fits the target, for which it is opened; None where there is none."""
    for found in cached_drafts(tokenizer, report):
        try:
            if not reads_target(found):
                substitutes(tokenizer, Tokenizer(os.fsencode(found)))
            return found
        except (OSError, ValueError) as error:
            report(f"passed over: {found}: {error}")
    return None


def substitutes(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Map target tokens that the draft lacks or numbers differently to the draft token read instead, a line end.

    Models of a family differ in a few tokens, such as chat markers, and in padding.

    Raises:
        ValueError: more than a tenth of the ids that both have differ; the message names the first.
    """
    shared = target.shared_with(draft)
    both = min(target.num_tokens, draft.num_tokens)
    if shared[:both].mean() < _LEAST_SHARED:
        token = int(np.argmin(shared[:both]))
        meanings = [
            "the end of text" if tokenizer.is_end(token) else repr(tokenizer.token_bytes(token, True))
            for tokenizer in (target, draft)
        ]
        raise ValueError(
            f"the draft's vocabulary is not the target's: token {token} is {meanings[0]} in the target and "
            f"{meanings[1]} in the draft; choose a draft trained with the target's tokenizer"
        )
    try:
        neutral = int(draft.encode("\n", add_special=False)[-1])
    except (ValueError, IndexError):  # the vocabulary has no line end
        neutral = int(np.argmax(shared))
    return dict.fromkeys(np.nonzero(~shared)[0].tolist(), neutral)
