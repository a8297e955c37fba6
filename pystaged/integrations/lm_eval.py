"""The model `pystaged` of lm-evaluation-harness: `python -m pystaged.integrations.lm_eval run --model pystaged ...`.

lm_eval finds models in its own registry alone. Importing this module adds ours; running it starts lm_eval's program.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import pystaged
from pystaged.decoding.readers import MOST_AT_ONCE, results
from pystaged.options.config import GenerationConfig

_USUAL_TOKENS = 256  # of an answer, as lm_eval's other models have it
_SCORING: dict[str, Any] = {"max_tokens": 1, "speculate": False, "temperature": 0.0, "prompt_logprobs": 1}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model("pystaged")
class LmEvalModel(TemplateLM):  # type: ignore[misc]
    """A model of lm-evaluation-harness.

    A log-probability has the same bits as in Engine.score, whatever the batch, the number of threads and the kernel.
    The results' configuration has a hash of all that was scored and of the receipts of all texts that were written, so
    equal hashes mean equal results.

    Args:
        model: a name or path, as for pystaged.load.
        batch_size: most texts at once; 1 to 64, or "auto" for 64.
        max_length: tokens of a context.
        draft: as for pystaged.load, or "none".
        **options: further options of pystaged.load, such as kv and num_threads.
        max_batch_size, device: of lm_eval's program; not used.

    Raises:
        As pystaged.load; ValueError for another batch size.
    """

    def __init__(
        self,
        model: str | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        draft: str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        del max_batch_size, device
        most = str(MOST_AT_ONCE) if str(batch_size).startswith("auto") else str(batch_size)
        if not most.isdecimal() or not 1 <= int(most) <= MOST_AT_ONCE:
            raise ValueError(f"batch_size must be 1 to {MOST_AT_ONCE}, or auto, not {batch_size}")
        self._most = int(most)
        if max_length is not None:
            options["n_ctx"] = max_length
        self._engine = pystaged.load(model, draft=None if draft == "none" else draft, **options)
        self._hashes: list[bytes] = []

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._engine.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """The token before texts without a context: the one that begins texts, else the one that ends them."""
        tokenizer = self._engine.tokenizer
        return tokenizer.bos if tokenizer.bos >= 0 else tokenizer.eos

    @property
    def tokenizer_name(self) -> str:
        """A name of the vocabulary and template, for lm_eval's cache."""
        return self._engine.vocabulary

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, with those that begin texts of the model's vocabulary unless False is asked for."""
        tokenizer = self._engine.tokenizer
        tokens: list[int] = tokenizer.encode(string, add_special_tokens is not False).tolist()
        if add_special_tokens is None and tokenizer.adds_bos and tokens[:2] == [tokenizer.bos] * 2:
            del tokens[0]  # a chat template has written it
        return tokens

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation, as text."""
        return self._engine.chat_format.render(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template, for lm_eval's records."""
        return self._engine.tokenizer.metadata.get("tokenizer.chat_template", "") if chat_template else None

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is greedy; contexts are cut from the left."""
        texts = [[*context, *more][-self._engine.n_ctx :] for _, context, more in requests]
        if too_long := [len(more) for _, _, more in requests if len(more) >= self._engine.n_ctx]:
            raise ValueError(
                f"a continuation of {too_long[0]} tokens does not fit in a context of {self._engine.n_ctx}; pass a "
                "larger max_length"
            )
        found: list[tuple[float, bool]] = []
        for first in range(0, len(texts), self._most):
            # The answers to a question follow each other, so its tokens are read once.
            sequences = [
                self._engine.start(text, GenerationConfig(**_SCORING, prompt_logprobs_start=len(text) - len(more)))
                for text, (_, _, more) in zip(texts[first : first + self._most], requests[first:], strict=False)
            ]
            for result, text in zip(results(sequences), texts[first:], strict=False):
                tokens = result.prompt_logprobs or []
                total = sum(each.logprob for each in tokens)
                found.append((total, all(each.token == each.top[0].token for each in tokens)))
                self._note(text, total)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text; texts longer than a context in windows, as lm_eval defines them."""
        del disable_tqdm
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text, False), self.prefix_token_id, self._engine.n_ctx - 1, 1
            )
            pairs = [("", *pair) for pair in map(make_disjoint_window, windows)]
            found.append(sum(total for total, _ in self._loglikelihood_tokens(pairs)))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes to each prompt until a stop string; prompts are cut from the left. Raises ValueError
        where answers may fill the context."""
        del disable_tqdm
        alike: dict[str, list[int]] = defaultdict(list)  # requests with the same options share passes
        asked = [request.args for request in requests]
        for i, (_, given) in enumerate(asked):
            alike[repr(sorted(given.items()))].append(i)
        written = [""] * len(asked)
        for members in alike.values():
            options = self._options(asked[members[0]][1])
            for first in range(0, len(members), self._most):
                some = members[first : first + self._most]
                room = self._engine.n_ctx - options["max_tokens"]
                if room < 1:
                    raise ValueError(
                        f"answers of {options['max_tokens']} tokens leave no room for prompts in a context of "
                        f"{self._engine.n_ctx}; pass a larger max_length, or fewer max_gen_toks"
                    )
                prompts = [self.tok_encode(asked[i][0])[-room:] for i in some]
                for i, result in zip(some, self._engine.generate(prompts, **options), strict=True):
                    written[i] = result.text
                    self._note(result.receipt.to_json())
        return written

    @staticmethod
    def _options(given: dict[str, Any]) -> dict[str, Any]:
        """The options of a request, spelled as ours."""
        until = given.get("until") or []
        options = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
        options["repeat_penalty"] = options.pop("repetition_penalty", 1.0)
        if not given.get("do_sample") or "temperature" not in options:
            options["temperature"] = 1.0 if given.get("do_sample") else 0.0
        tokens = given.get("max_gen_toks", given.get("max_new_tokens", _USUAL_TOKENS))
        return options | {"max_tokens": int(tokens), "stop": [until] if isinstance(until, str) else until, "seed": 0}

    def get_model_info(self) -> dict[str, Any]:
        """The model and the hash of all results, in any order, for lm_eval's records."""
        file = self._engine.file
        return {
            "pystaged_version": pystaged.__version__,
            "model_file": file.path.name,
            "model_sha256": file.sha256(),
            "results_sha256": hashlib.sha256(b"".join(sorted(self._hashes))).hexdigest(),
        }

    def _note(self, *result: Any) -> None:
        self._hashes.append(hashlib.sha256(repr(result).encode()).digest())


if __name__ == "__main__":
    cli_evaluate()
