"""The runner of Hugging Face transformers on the same weights, dequantized to F32: plain, assisted, prompt lookup."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pystaged.bench.worker import Measurement
from pystaged.config import SamplingConfig

_LOOKUP_TOKENS = 10  # of its documentation's example


class _Clock:
    """A streamer that notes when how many tokens come; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []

    def put(self, value: Any) -> None:
        self.times.append((time.perf_counter(), int(value.numel())))

    def end(self) -> None:
        pass


class Runner:
    """Decodes with `generate`; all its ways share the weights.

    Args:
        setup: model, draft (path or None), threads, ends (tokens that end a text).
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        torch.set_num_threads(setup["threads"])
        self._model = self._load(setup["model"])
        self._draft = self._load(setup["draft"]) if setup["draft"] else None
        self._passes = 0
        self._model.register_forward_hook(self._count)
        self._ends = list(setup["ends"]) or None

    def run(self, job: dict[str, Any]) -> Measurement:
        sampling: SamplingConfig = job["sampling"]
        clock, prompt = _Clock(), torch.tensor([job["prompt"]])
        options: dict[str, Any] = {"do_sample": False}
        if not sampling.is_greedy:
            torch.manual_seed(sampling.seed)
            options = {"do_sample": True, "temperature": sampling.temperature}
            options |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
        if job["way"] == "assisted":
            options["assistant_model"] = self._draft
        if job["way"] == "lookup":
            options["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        self._passes = 0
        begin = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=job["max_tokens"],
                eos_token_id=self._ends,
                pad_token_id=0,
                streamer=clock,
                **options,
            )
        tokens = output[0, len(job["prompt"]) :].tolist()
        _, (first, num_first), *later = clock.times
        last = later[-1][0] if later else first
        # What came with the prompt is no decoding.
        return Measurement(len(tokens) - num_first, last - first, first - begin, tokens, self._passes - 1)

    def close(self) -> None:
        pass

    def _load(self, path: str) -> Any:
        file = Path(path)
        return AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()

    def _count(self, *_: object) -> None:
        self._passes += 1
