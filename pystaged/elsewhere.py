"""Other programs' names of commands, options and addresses. A tuple, name or address is ours for theirs; a
sentence says why there is none."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

# Ollama's, and what ours were called before.
COMMANDS: dict[str, tuple[str, ...] | str] = {
    "list": ("models",),
    "ls": ("models",),
    "ps": "nothing stays loaded between commands; of a server, GET /v1/models says what it serves",
    "repl": ("chat", "--raw"),
    "rm": ("models", "remove"),
    "run": ("chat",),
    "show": ("info",),
    "stop": "nothing stays loaded between commands; Ctrl-C ends a server",
    "models list": ("models",),
    "models ls": ("models",),
    "models pull": ("pull",),
    "models rm": ("models", "remove"),
    "models show": ("info",),
}

PROMPT = "PROMPT"  # of an option: what follows it is the argument
_ALWAYS = "is always so"
_CACHE = "is --kv here, f16 or q8_0 for keys and values together"
_DEPTH = "is decided anew at each step; --draft names a model"
_DEVICE = "is --device here: all layers run on the device it names, such as metal or gpu"
_PASSES = "has no like: how many tokens a pass takes is decided here"
# What options of commands were called in the last release.
FORMER_OPTIONS = {
    "--keep-packed": "--weight-cache",
    "--memory": "--recycle",
    "--no-memory": "--no-recycle",
    "--no-peer": "--no-baseline",
    "--peer": "--baseline",
}
# llama.cpp's, Ollama's and vLLM's options of programs.
OPTIONS = {
    **FORMER_OPTIONS,
    "-a": "--alias",
    "-b": _PASSES,
    "-cb": _ALWAYS,
    "-cnv": "is the command chat here",
    "-ctk": _CACHE,
    "-ctv": _CACHE,
    "-f": "has no like: give the text on standard input, as in: pystaged generate - < FILE",
    "-fa": _ALWAYS,
    "-hf": "--model",
    "-hfd": "--draft",
    "-i": "is the command chat here",
    "-j": "--json-schema",
    "-jf": "--json-schema",
    "-md": "--draft",
    "-n": "--max-tokens",
    "-ngl": _DEVICE,
    "-no-cnv": "is the command generate here, or chat --raw",
    "-np": "--parallel",
    "-p": PROMPT,
    "-s": "--seed",
    "-sys": "--system",
    "-sysf": "is --system @FILE here",
    "-t": "--threads",
    "-to": "--timeout",
    "-ub": _PASSES,
    "--batch-size": _PASSES,
    "--cache-type-k": _CACHE,
    "--cache-type-v": _CACHE,
    "--chat-template": "has no like: the model's own template is used",
    "--context-length": "--n-ctx",
    "--conversation": "is the command chat here",
    "--ctx-size": "--n-ctx",
    "--device-draft": "--draft-device",
    "--draft-max": _DEPTH,
    "--draft-min": _DEPTH,
    "--embedding": "has no like: there are no embeddings",
    "--embeddings": "has no like: there are no embeddings",
    "--file": "has no like: give the text on standard input, as in: pystaged generate - < FILE",
    "--flash-attn": _ALWAYS,
    "--format": "is --json-schema here, which takes a schema",
    "--gpu-layers": _DEVICE,
    "--grammar-file": "--grammar",
    "--hf-repo": "--model",
    "--interactive": "is the command chat here",
    "--jinja": _ALWAYS,
    "--json-schema-file": "--json-schema",
    "--logits-all": "is --logprobs here, with --json",
    "--lora": "has no like: adapters have to be merged into the model first",
    "--max-model-len": "--n-ctx",
    "--max-new-tokens": "--max-tokens",
    "--metrics": "is always so: they are at /metrics",
    "--mirostat": "has no like: there are --top-p, --min-p and other filters",
    "--mlock": "has no like: weights are read into memory, not mapped",
    "--mmproj": "has no like: models read text alone",
    "--model-draft": "--draft",
    "--n-gpu-layers": _DEVICE,
    "--n-predict": "--max-tokens",
    "--no-conversation": "is the command generate here, or chat --raw",
    "--no-mmap": _ALWAYS,
    "--num-ctx": "--n-ctx",
    "--num-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--prompt": PROMPT,
    "--reasoning-budget": "is --think or --no-think here",
    "--repetition-penalty": "--repeat-penalty",
    "--samplers": "has no like: filters have one order, and --temperature-last llama.cpp's of the temperature",
    "--served-model-name": "--alias",
    "--system-prompt": "--system",
    "--system-prompt-file": "is --system @FILE here",
    "--temp": "--temperature",
    "--tensor-parallel-size": "has no like: --device rpc:HOST:PORT,... divides a model between machines",
    "--typical": "--typical-p",
    "--ubatch-size": _PASSES,
}

# What ours were called in the last release.
RENAMED = {
    "house": "bundled",
    "house-draft": "bundled-draft",
    "keep_packed": "weight_cache",
    "memory": "recycle",
    "prompt_delay": "prefill_budget",
}

# transformers', llama-cpp-python's and vLLM's options in Python.
KEYWORDS = {
    "context_length": "n_ctx",
    "ctx_size": "n_ctx",
    "do_sample": "a temperature above 0 samples",
    "draft_model": "draft",
    "flash_attn": "that is always so",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_model_len": "n_ctx",
    "max_new_tokens": "max_tokens",
    "model_path": "model",
    "n_gpu_layers": "device",
    "n_predict": "max_tokens",
    "n_threads": "num_threads",
    "num_ctx": "n_ctx",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "repetition_penalty": "repeat_penalty",
    "response_format": "json_schema",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "temp": "temperature",
    "threads": "num_threads",
    "use_mmap": "weights are always read into memory",
}

# Ollama's, LM Studio's and llama-server's addresses.
ADDRESSES = {
    "/api/chat": "use /v1/chat/completions",
    "/api/embed": "there are no embeddings",
    "/api/embeddings": "there are no embeddings",
    "/api/generate": "use /v1/completions",
    "/api/ps": "use /v1/models",
    "/api/show": "use /props",
    "/api/tags": "use /v1/models",
    "/api/v0/chat/completions": "use /v1/chat/completions",
    "/api/v0/completions": "use /v1/completions",
    "/api/v0/models": "use /v1/models",
    "/api/version": "use /props",
    "/chat": "use /",
    "/docs": "use /openapi.json",
    "/embedding": "there are no embeddings",
    "/embeddings": "there are no embeddings",
    "/infill": "use /v1/completions",
    "/slots": "use /metrics",
    "/v1/embeddings": "there are no embeddings",
}


# Ollama's name of a repository on the hub, and the browser's address of one or of a file in it.
_HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:hf|huggingface)\.co/([^/?#]+/[^/?#]+)/?(?:(?:tree|blob|resolve)/main/?)?([^?#]*)(?:[?#].*)?"
)


def hub_id(name: str) -> str:
    """The hub id that an address on the hub stands for, owner/name or owner/name:FILE; what is no address, as it is."""
    found = _HUB_ADDRESS.fullmatch(name)
    return ":".join(filter(None, found.groups())) if found else name


def renamed(name: Any) -> Any:
    """Today's name of a model or an option that had another one in the last release, with a DeprecationWarning; what
    else is given, as it is."""
    if not (isinstance(name, str) and name in RENAMED):
        return name
    warnings.warn(f"{name} is called {RENAMED[name]} now", DeprecationWarning, stacklevel=3)
    return RENAMED[name]


def meant(word: str, ours: Iterable[str]) -> str | None:
    """Our name that a wrong one is likely to mean."""
    ours = list(ours)
    beginning = [each for each in ours if len(word) > 3 and each.startswith(word)]
    return next(iter(beginning or get_close_matches(word, ours, 1)), None)
