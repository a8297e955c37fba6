"""A loaded target and its drafters: draft, n-gram table, recycled candidates."""

from __future__ import annotations

import itertools
import os
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pystaged._core import DeviceError, Model, ModelError, Tokenizer, UnsupportedModelError
from pystaged.backends.devices import candidates, check, close_model, load_model
from pystaged.decoding.policy import best_size
from pystaged.drafting.calibration import Calibration
from pystaged.drafting.lookups import LOOKUP_SECONDS
from pystaged.drafting.model import PLACES
from pystaged.loading import names
from pystaged.loading.costs import Costs
from pystaged.loading.distilled import find_distilled
from pystaged.loading.drafts import cached_drafts, own_layer, substitutes
from pystaged.loading.features import load_features
from pystaged.loading.kept import load_packed
from pystaged.loading.metadata import read_metadata, reads_target
from pystaged.loading.progress import announced
from pystaged.loading.recycled import KeptCandidates
from pystaged.loading.tables import find_table
from pystaged.options.config import checked
from pystaged.options.table import LOADING, LoadFields
from pystaged.platform.memory import available_memory, loadable_memory
from pystaged.platform.seen import SeenModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LLAMA = "ggml-cpu"  # the device of models that pystaged's kernels do not compute
_USUAL_LENGTH = 1000  # past length, in tokens, at which devices are compared
# Where devices are compared: acceptance rates of a draft's and of n-grams' first guesses, and guesses of a chain.
_DRAFT_RATE, _NGRAM_RATE, _LONGEST = 0.75, 0.53, 8


class Bundle:
    """A loaded target with all that its contexts share.

    Options and errors: see Engine.

    Attributes:
        options: all options of loading, those not given with their defaults.
        file: the target's files as they were when it was loaded.
        vocabulary: fingerprint of the target's vocabulary.
        draft, features: the draft model, and the draft that reads the target's hidden states, None where absent; at
            most one is loaded.
        draft_mask: mask token of a parallel draft, -1 for any other.
        substitutes: see the function of that name.
        recycled: the likeliest tokens that the target computed after each token it has seen; None if they are not kept.
        calibrations: how often candidates are right, by whether decoding is greedy; kept with them.
        costs: seconds of passes, measured or loaded.
        inexact: why texts of the target are not exact, where its kind is not for pystaged's kernels; else "".
    """

    def __init__(self, model: str | Path, **options: Unpack[LoadFields]) -> None:
        self.options = options = cast(LoadFields, checked(LOADING, options))
        draft, device, draft_device, kv = options["draft"], options["device"], options["draft_device"], options["kv"]
        report = options["report"] or (lambda _: None)
        device, draft_device = check(device, kv), check(draft_device)
        if candidates(device, kv) == ["cpu"]:
            device = "cpu"
        self.inexact, self.costs = "", Costs(report)
        progress = announced(report)
        self.path, given = names.resolve(model, progress), names.resolve_draft(model, draft, progress)
        self.file = SeenModel.now(self.path)
        self.tokenizer = _tokenizer(self.path)
        self.vocabulary = self.tokenizer.fingerprint
        is_chosen = given is not None or draft != "auto"
        if given and reads_target(given, self.tokenizer.metadata):
            if draft_device not in ("cpu", "auto"):
                raise ValueError(f"{given} reads hidden states on the cpu; leave out the draft's device")
            if device == "auto":
                report(f"the model runs on the cpu, because drafts such as {given.name} read its hidden states")
                device = "cpu"

        def load(path: Path, device: str) -> dict[str, Model]:
            """Load a model on each device that it may run on."""
            kept, loaded = report if options["weight_cache"] else None, dict[str, Model]()
            devices = candidates(device, kv)
            for name in devices:
                try:
                    loaded[name] = _load(path, options["num_threads"], name, kv, kept)
                except UnsupportedModelError as error:
                    why = str(error).removeprefix(f"{path}: ").partition(";")[0]
                    runs = f"{path.name} runs by llama.cpp"
                    if kv != "f16":
                        raise ValueError(f"{runs}, which needs kv='f16' (--kv f16), not {kv} ({why})") from None
                    report(f"{runs}: not exact, drafts from n-grams and draft models only ({why})")
                    self.inexact = f"{runs}, because {why}" if path == self.path else self.inexact
                    loaded[_LLAMA] = _load(path, options["num_threads"], _LLAMA, kv, None)
                except DeviceError as error:
                    if not loaded and name == devices[-1]:
                        raise
                    report(f"passed over: {error}")
            return loaded

        targets = load(self.path, device)
        drafts: dict[str, Model] = {}
        self.draft_path: Path | None = None
        self.features: Model | None = None
        self.substitutes: dict[int, int] = {}
        self.draft_mask = -1
        only = next(iter(targets.values()))  # of several devices none is for a draft that reads hidden states
        for path in filter(None, [given] if is_chosen else self._usual_drafts(only, device, draft_device, report)):
            try:
                if reads_target(path, self.tokenizer.metadata):
                    self.features = load_features(path, only, self.path, self.tokenizer, report)
                else:
                    tokenizer = Tokenizer(os.fsencode(path))
                    replaced = substitutes(self.tokenizer, tokenizer)
                    drafts = load(path, draft_device)
                    self.substitutes, self.draft_mask = replaced, tokenizer.mask_token
                self.draft_path = path
                break
            except (OSError, ValueError, MemoryError) as error:
                if is_chosen:
                    raise
                report(f"passed over: {path}: {error}")
                if not only.devices:
                    only.tap([])
        of_draft = self.draft_path if is_chosen and drafts else None
        self.table = find_table(of_draft or self.path, options["ngrams"], self.tokenizer, report)
        self.device, self.draft_device = self._fastest(targets, drafts, report)
        self.target = targets[self.device]
        self.draft = drafts[self.draft_device] if drafts else None
        if self.draft and self.draft.weight_bytes >= self.target.weight_bytes:
            report(f"the draft {self.draft_path} is as large as the model, and used only where it takes less time")
        self._kept = KeptCandidates(self.path, self.vocabulary, self.draft_path) if options["recycle"] else None
        self.recycled = self._kept.candidates if self._kept else None
        self.calibrations = self._kept.calibrations if self._kept else {True: Calibration(), False: Calibration()}
        self.text_over: Callable[[], None] = self._kept.save_now_and_then if self._kept else lambda: None
        if self._kept:
            weakref.finalize(self, self._kept.save)  # programs may exit without calling close()

    def _usual_drafts(
        self, target: Model, device: str, draft_device: str, report: Callable[[str], None]
    ) -> Iterator[Path | None]:
        """The drafts to try where none is named, the best first."""
        on_cpu = device == "cpu" and not target.devices and draft_device in ("cpu", "auto")
        if on_cpu:
            yield find_distilled(self.path, self.tokenizer, report)
            yield own_layer(self.path, self.tokenizer)
        yield from cached_drafts(self.tokenizer, report, on_cpu=on_cpu)

    @property
    def models(self) -> list[Model]:
        """The target, and the draft if that is a model."""
        return [model for model in (self.target, self.draft, self.features) if model is not None]

    def check_exact(self) -> None:
        """Raise ValueError if texts of the target are not exact, because pystaged's kernels do not compute it."""
        if self.inexact:
            raise ValueError(
                f"{self.inexact}: its texts are not promised to be the same again; "
                "receipts need the device by its name, --device ggml-cpu"
            )

    def free_memory(self) -> int:
        """Bytes of memory free for contexts on this machine, estimated."""
        # available_memory() counts pages mapped from a file as free.
        return max(available_memory() - sum(model.matrix_bytes for model in self.models if model.is_mapped), 0)

    def close(self) -> None:
        """Save costs and what drafting learnt, and close the connections to RPC servers."""
        self.costs.save()
        if self._kept:
            self._kept.save()
        for model in self.models:
            close_model(model)

    def _fastest(
        self, targets: dict[str, Model], drafts: dict[str, Model], report: Callable[[str], None]
    ) -> tuple[str, str]:
        """The devices of target and draft with the highest predicted tokens per second."""
        pairs = list(itertools.product(targets, drafts or ["cpu"]))
        if len(pairs) == 1:
            return pairs[0]
        places = PLACES if self.draft_mask >= 0 else 1

        def rate(pair: tuple[str, str]) -> float:
            target_cost = self.costs.of(self.path, pair[0], targets[pair[0]], compared=True)
            guesses = [(_NGRAM_RATE, LOOKUP_SECONDS, 1)]
            if self.draft_path:
                draft_cost = self.costs.of(self.draft_path, pair[1], drafts[pair[1]], compared=True)
                guesses.append((_DRAFT_RATE, draft_cost(places, _USUAL_LENGTH), places))
            best = []
            for right, price, at_once in guesses:  # of chains, as long as pays
                passes = [target_cost(1 + n, _USUAL_LENGTH) + -(-n // at_once) * price for n in range(_LONGEST + 1)]
                best.append(best_size(1.0, [right**n for n in range(1, _LONGEST + 1)], passes, 0.0)[1])
            return max(best)

        rates: dict[tuple[str, str], float] = {}
        failures: dict[str, DeviceError] = {}
        for pair in pairs:
            try:
                rates[pair] = rate(pair)
            except DeviceError as error:  # no room for a context, say
                failures[str(error)] = error
        if not rates:
            raise next(iter(failures.values()))
        for failure in failures:
            report(f"passed over: {failure}")
        return max(rates, key=lambda pair: rates[pair])


def _tokenizer(path: Path) -> Tokenizer:
    # As bytes, because a file name need not be valid Unicode.
    try:
        return Tokenizer(os.fsencode(path))
    except ModelError:
        if reads_target(path):
            raise ValueError(
                f"{path} is a draft, not a model; name the model it was made for, and pass this file as its draft"
            ) from None
        if read_metadata(path).get("general.architecture") == "clip":
            raise ValueError(
                f"{path} reads images for a model (mmproj), and models here read text only; name the model's own file"
            ) from None
        raise


def _load(path: Path, num_threads: int, device: str, kv: str, kept: Callable[[str], None] | None) -> Model:
    """Load a model; with `kept`, map its weights from the weight cache and report the cache's problems to it."""
    kernel, need, most = os.environ.get("PYSTAGED_KERNEL", ""), SeenModel.now(path).size, loadable_memory()
    if device in ("cpu", _LLAMA) and need > most:  # it would swap without end
        raise DeviceError(
            f"{path} needs {need / 1e9:.1f} GB of memory, and there are {most / 1e9:.1f} GB; use a file of a smaller "
            "type, such as `pystaged quantize` makes"
        )
    try:
        if kept and device == "cpu":
            return load_packed(path, kernel, num_threads, kept, kv)
        return load_model(os.fsencode(path), kernel, num_threads, device, kv)
    except ModelError as error:
        if re.search(r"tensor '(v|a|mm)\.", str(error)):
            raise ValueError(
                f"{path} also reads images or sound, as Ollama's files may, and models here read text only; take "
                "a file of text alone, which repositories on the hub have: `pystaged pull OWNER/NAME-GGUF`"
            ) from None
        raise
