"""Names of commands, options and addresses in other programs, and pystaged's equivalents: a tuple or a name, or a
sentence that says why there is none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from urllib.parse import unquote

# Commands of Ollama and llama.cpp.
COMMANDS: dict[str, tuple[str, ...] | str] = {
    "convert": ("quantize",),
    "create": "there are no Modelfiles; chat takes --system and options of sampling",
    "list": ("models",),
    "ls": ("models",),
    "ps": "nothing stays loaded between commands; GET /v1/models lists the models of a server",
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

PROMPT = "PROMPT"  # the option's value is the argument PROMPT
_ALWAYS = "is always on"
_CACHE = "is --kv here, f16 or q8_0 for keys and values together"
_DEPTH = "is chosen automatically at each step; --draft names a model"
_DEVICE = "is --device here: all layers run on the device it names, such as metal or gpu"
_PASSES = "has no equivalent: the tokens of a pass are chosen automatically"
# Command-line options of llama.cpp, Ollama and vLLM.
OPTIONS = {
    "-a": "--alias",
    "-b": _PASSES,
    "-cb": _ALWAYS,
    "-cnv": "is the command chat here",
    "-ctk": _CACHE,
    "-ctv": _CACHE,
    "-f": "has no equivalent: give the text on standard input, as in: pystaged generate - < FILE",
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
    "--chat-template": "has no equivalent: the model's own template is used",
    "--context-length": "--n-ctx",
    "--conversation": "is the command chat here",
    "--ctx-size": "--n-ctx",
    "--device-draft": "--draft-device",
    "--draft-max": _DEPTH,
    "--draft-min": _DEPTH,
    "--embedding": "is not needed: the server always has /v1/embeddings",
    "--embeddings": "is not needed: the server always has /v1/embeddings",
    "--file": "has no equivalent: give the text on standard input, as in: pystaged generate - < FILE",
    "--flash-attn": _ALWAYS,
    "--format": "is --json-schema here, which takes a schema",
    "--gpu-layers": _DEVICE,
    "--grammar-file": "--grammar",
    "--hf-repo": "--model",
    "--interactive": "is the command chat here",
    "--jinja": _ALWAYS,
    "--json-schema-file": "--json-schema",
    "--logits-all": "is --logprobs here, with --json",
    "--lora": "has no equivalent: merge adapters into the model first",
    "--max-model-len": "--n-ctx",
    "--max-new-tokens": "--max-tokens",
    "--metrics": "is always on: metrics are at /metrics",
    "--mirostat": "has no equivalent: there are --top-p, --min-p and other filters",
    "--mlock": "has no equivalent: weights are read into memory, not mapped",
    "--mmproj": "has no equivalent: models read text only",
    "--model-draft": "--draft",
    "--n-gpu-layers": _DEVICE,
    "--n-predict": "--max-tokens",
    "--no-conversation": "is the command generate here, or chat --raw",
    "--no-mmap": _ALWAYS,
    "--num-ctx": "--n-ctx",
    "--num-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--prompt": PROMPT,
    "--reasoning-budget": "is --think or --no-think here; serve has --reasoning-budget",
    "--repetition-penalty": "--repeat-penalty",
    "--samplers": "has no equivalent: filters have a fixed order; --temperature-last moves temperature to its end",
    "--served-model-name": "--alias",
    "--system-prompt": "--system",
    "--system-prompt-file": "is --system @FILE here",
    "--temp": "--temperature",
    "--tensor-parallel-size": "has no equivalent: --device rpc:HOST:PORT,... splits the layers over machines",
    "--typical": "--typical-p",
    "--ubatch-size": _PASSES,
}

# Python options of transformers, llama-cpp-python and vLLM.
KEYWORDS = {
    "context_length": "n_ctx",
    "ctx_size": "n_ctx",
    "do_sample": "a temperature above 0 samples",
    "draft_model": "draft",
    "flash_attn": "that is always on",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_model_len": "n_ctx",
    "max_new_tokens": "max_tokens",
    "model_path": "model",
    "n_gpu_layers": "device",
    "n_predict": "max_tokens",
    "n_threads": "num_threads",
    "num_ctx": "n_ctx",
    "num_gpu": "device",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "num_thread": "num_threads",
    "repetition_penalty": "repeat_penalty",
    "response_format": "json_schema",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "temp": "temperature",
    "threads": "num_threads",
    "use_mmap": "weights are always read into memory",
}

# Words after /set in Ollama's chat.
SETTINGS = {
    "format": "start with --json-schema, which takes a schema",
    "history": "/save FILE saves a conversation",
    "nohistory": "nothing is saved without /save FILE",
    "nowordwrap": "lines always break between words",
    "quiet": "write /stats off",
    "verbose": "write /stats on",
    "wordwrap": "lines always break between words",
}

# HTTP paths of Ollama, LM Studio and llama-server.
ADDRESSES = {
    "/api/embeddings": "use /api/embed",
    "/api/v0/chat/completions": "use /v1/chat/completions",
    "/api/v0/completions": "use /v1/completions",
    "/api/v0/models": "use /v1/models",
    "/api/v1/chat": "use /v1/chat/completions",
    "/api/v1/models": "use /v1/models",
    "/chat": "use /",
    "/docs": "use /openapi.json",
    "/embedding": "use /v1/embeddings",
    "/slots": "use /metrics",
}


# A web address on the hub, also without https:// as Ollama writes it; and what follows its host where that is a model.
_HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:hf|huggingface)\.co(?::\d+)?(?:/([^?#]*))?(?:[?#].*)?", re.IGNORECASE
)
_HUB_MODEL = re.compile(
    r"(?!(?:api|blog|collections|datasets|docs|papers|spaces)/)([\w.-]+/[\w.-]+)"
    r"(?::(.+)|/tree/main|/(?:tree|blob|resolve|raw)/main/(.+))?"
)


def hub_id(name: str) -> str:
    """Convert an address on the hub to a hub id, owner/name or owner/name:FILE; return what is no address unchanged.

    Raises ValueError for an address of anything else than a model, or of another branch than main.
    """
    address = _HUB_ADDRESS.fullmatch(name)
    if not address:
        return name
    found = _HUB_MODEL.fullmatch(unquote(address[1] or "").rstrip("/"))
    if not found:
        raise ValueError(
            f"{name} is not the address of a model; give hf.co/OWNER/NAME, hf.co/OWNER/NAME:TYPE, "
            "or hf.co/OWNER/NAME/blob/main/FILE.gguf"
        )
    return ":".join(filter(None, found.groups()))


def meant(word: str, ours: Iterable[str]) -> str | None:
    """The name among `ours` that a mistyped one is likely to mean, or None."""
    ours = list(ours)
    beginning = [each for each in ours if len(word) > 3 and each.startswith(word)]
    return next(iter(beginning or get_close_matches(word, ours, 1)), None)
