"""What is killed, or runs out of disk: works that write files, each with what it leaves. Run as a program,
`works.py NAME FOLDER`, it does a work anew in a child of fork() for each line of standard input:

    kill SECONDS    and kills it so long after it began
    limit BYTES     with no file longer than that
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from support.checkpoints import write_family
from support.convert import convert
from support.families import CASES
from support.random_models import write
from support.steps import prefill

from pystaged._core import Model, RecycledCandidates, Session
from pystaged.drafting.table import NgramTable
from pystaged.loading import cache, hub
from pystaged.loading.kept import PACKED, load_packed
from pystaged.loading.prompt_cache import KeptPrompts
from pystaged.loading.quantize import quantize
from pystaged.loading.recycled import KeptCandidates
from pystaged.platform.files import leftovers

KEPT = RecycledCandidates.num_candidates

PULLED = "someone/tiny-GGUF"
SAVED = 25  # times that a small file is saved, one after the other
PROMPT = [7 * i % 250 for i in range(400)]
State = object


@dataclass(frozen=True)
class Work:
    """Something that writes a file.

    Args:
        prepare: makes what it reads, once.
        run: does it.
        state: what is there afterwards, None for nothing; raises where that is damaged.
        failures: what it may raise where there is no room; none for what is a convenience.
    """

    prepare: Callable[[Path], object]
    run: Callable[[Path], object]
    state: Callable[[Path], State]
    failures: tuple[type[Exception], ...] = ()


def tensors(path: Path) -> State:
    """All tensors of a model, None without a file."""
    if not path.exists():
        return None
    return [(tensor.name, bytes(tensor.data)) for tensor in GGUFReader(path).tensors]


def convert_checkpoint(folder: Path) -> None:
    convert(folder / "checkpoint", folder / "out.gguf", quantization="F16")


def quantize_model(folder: Path) -> None:
    quantize(folder / "model.gguf", folder / "out.gguf", "q8_0")


def pack(folder: Path) -> None:
    PACKED.path(folder / "model.gguf").unlink(missing_ok=True)
    load_packed(folder / "model.gguf", "", 1, lambda _: None)


def packed(folder: Path) -> State:
    path = PACKED.path(folder / "model.gguf")
    return path.read_bytes() if path.exists() else None


def _memory(folder: Path) -> KeptCandidates:
    return KeptCandidates(folder / "model.gguf", "v")


def save_memory(folder: Path) -> None:
    memory = _memory(folder)
    for _ in range(SAVED):
        tokens = np.arange(200 * KEPT, dtype=np.int32).reshape(200, KEPT) % 300
        memory.candidates.learn(tokens[:, 0], tokens[:, 1], tokens, -np.ones((200, KEPT), np.float32))
        memory.save()


def memory(folder: Path) -> State:
    return len(_memory(folder).candidates.entries()) or None


def keep_prompt(folder: Path) -> None:
    for path in (folder / "prompts").glob("*.prompt"):
        path.unlink()
    kept, session = _prompts(folder, lambda _: None)
    prefill(session, PROMPT)
    kept.keep([session])
    kept.close()


def prompt(folder: Path) -> State:
    def refuse(line: str) -> None:
        raise ValueError(line)

    kept, session = _prompts(folder, refuse)
    found = kept.find(np.array(PROMPT, np.int32), session.n_ctx, 0)
    if found:
        kept.load(found[0], [session])
    return session.tokens.tolist() or None


def _prompts(folder: Path, report: Callable[[str], None]) -> tuple[KeptPrompts, Session]:
    kept = KeptPrompts(folder / "prompts", "content", 1 << 30, report)
    return kept, Session(Model(folder / "model.gguf", "", 1))


def save_table(folder: Path) -> None:
    documents = [np.random.default_rng(0).integers(0, 50, 5000)]
    table = NgramTable.build(documents, vocab_size=50, vocab_hash="50-0123456789abcdef")
    for _ in range(5):
        table.save(folder / "table.npz")


def table(folder: Path) -> State:
    path = folder / "table.npz"
    return NgramTable.load(path).tokens.tolist() if path.exists() else None


def pull(folder: Path) -> None:
    del folder
    hub.pull(PULLED)


def pulled(folder: Path) -> State:
    del folder
    found = cache.find("tiny-GGUF")
    if found:
        cache.about(found)
    return found.read_bytes() if found else None


def remove_pulled(folder: Path) -> None:
    """Pulled and removed, again and again."""
    pull(folder)
    cache.remove("tiny-GGUF")
    pull(folder)


def _prepare(folder: Path, case: str = "llama") -> None:
    write(folder / "model.gguf", CASES[case])


_untied = partial(_prepare, case="llama-untied")

WORKS = {
    "convert": Work(
        lambda folder: write_family(folder / "checkpoint", "llama"),
        convert_checkpoint,
        lambda folder: tensors(folder / "out.gguf"),
        (OSError,),
    ),
    "quantize": Work(_untied, quantize_model, lambda folder: tensors(folder / "out.gguf"), (OSError, ValueError)),
    "pull": Work(lambda _: None, remove_pulled, pulled, (OSError,)),
    "packed": Work(_prepare, pack, packed),
    "memory": Work(_prepare, save_memory, memory),
    "prompts": Work(_prepare, keep_prompt, prompt),
    "table": Work(_prepare, save_table, table, (OSError,)),
}


def main() -> None:
    work, folder = WORKS[sys.argv[1]], Path(sys.argv[2])
    for line in sys.stdin:
        order, number = line.split()
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(attempt(work, folder, int(number) if order == "limit" else 0))
        if order == "kill":
            time.sleep(float(number))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)} {time.monotonic() - begun}\n")
        sys.stdout.flush()


def attempt(work: Work, folder: Path, limit: int) -> int:
    """0 where it was done, 1 where it was refused, 2 where it failed in another way."""
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        work.run(folder)
    except work.failures as error:
        return 1 if str(error) else 2
    except BaseException as error:  # it must not go on in this copy of the program
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return 0


def parts(folder: Path) -> list[Path]:
    """What killed writers left of ours; what huggingface_hub leaves in its own folders is its own."""
    return [part for part in leftovers(folder) if "huggingface" not in part.parts and "hf" not in part.parts]


if __name__ == "__main__":
    main()
