"""Runner for openvino-genai, which reads GGUF files: plain, with a draft model, or with prompt lookup."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import openvino
import openvino_genai

from pystaged.bench.worker import Measurement
from pystaged.config import SamplingConfig

_GUESSES = 5  # tokens drafted at once, as in its documentation's examples
_NGRAM = 3


class Runner:
    """Decodes with an `LLMPipeline`.

    Args:
        setup: model, draft (path or None), threads, n_ctx, ends; way: "plain", "draft" or "prompt lookup".
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._folder: TemporaryDirectory[str] | None = None
        options = {"INFERENCE_NUM_THREADS": setup["threads"], "PERFORMANCE_HINT": "LATENCY"}
        more: dict[str, Any] = {}
        if setup["way"] != "plain":
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.max_num_batched_tokens = setup["n_ctx"]
            scheduler.enable_prefix_caching = False
            more["scheduler_config"] = scheduler
        if setup["way"] == "draft":
            # A draft must be a saved OpenVINO model; GGUF is not accepted there.
            self._folder = TemporaryDirectory()
            (link := Path(self._folder.name) / "draft.gguf").symlink_to(Path(setup["draft"]).resolve())
            openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
            more["draft_model"] = openvino_genai.draft_model(self._folder.name, "CPU", **options)
        if setup["way"] == "prompt lookup":
            more["prompt_lookup"] = True
        self._pipeline = openvino_genai.LLMPipeline(setup["model"], "CPU", **options, **more)

    def run(self, job: dict[str, Any]) -> Measurement:
        prompt = np.array([job["prompt"]], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        found = self._pipeline.generate(inputs, self._config(job))
        raw = found.perf_metrics.raw_metrics
        # Despite their names these are microseconds: one per token, and one per pass after the first of each.
        seconds, steps = sum(raw.m_durations) / 1e6, len(raw.m_batch_sizes) - 1
        first = raw.m_times_to_first_token[0] / 1e6
        return Measurement(len(raw.m_durations), seconds, first, list(found.tokens[0]), steps)

    def close(self) -> None:
        if self._folder:
            self._folder.cleanup()

    def _config(self, job: dict[str, Any]) -> Any:
        sampling: SamplingConfig = job["sampling"]
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = job["max_tokens"]
        config.stop_token_ids = set(self._setup["ends"])
        if not sampling.is_greedy:
            config.do_sample = True
            config.temperature = sampling.temperature
            config.top_k = sampling.top_k or 2**31 - 1
            config.top_p = sampling.top_p
            config.rng_seed = sampling.seed
        if self._setup["way"] != "plain":
            config.num_assistant_tokens = _GUESSES
        if self._setup["way"] == "prompt lookup":
            config.max_ngram_size = _NGRAM
        return config
