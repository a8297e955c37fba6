"""Names of commands, options and addresses in other programs, and pystaged's equivalents: a tuple or a name, or a
sentence that says why there is none. Pydantic's messages in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from urllib.parse import unquote

# Commands of Ollama and llama.cpp.
COMMANDS: dict[str, tuple[str, ...] | str] = {
    "cli": ("chat",),
    "convert": ("quantize",),
    "completion": "pystaged --install-completion installs the completion of your shell",
    "cp": "models are not copied; serve --alias names one for clients",
    "create": "there are no Modelfiles; chat takes --system and options of sampling",
    "embed": "a server has embeddings: pystaged serve, at /v1/embeddings",
    "list": ("models",),
    "llama-server": ("serve",),
    "ls": ("models",),
    "ps": "nothing stays loaded between commands; GET /api/ps lists what a server has loaded",
    "push": "models are not uploaded; hf upload, of the package huggingface_hub, does that",
    "rm": ("models", "remove"),
    "run": ("chat",),
    "search": "models are found at https://huggingface.co/models?library=gguf; pull downloads one",
    "show": ("info",),
    "stop": "nothing stays loaded between commands; Ctrl-C ends a server",
    "tokenize": "a server has that: pystaged serve, at /tokenize",
    "models list": ("models",),
    "models ls": ("models",),
    "models pull": ("pull",),
    "models rm": ("models", "remove"),
    "models show": ("info",),
}

_ALIKE = 0.7  # least similarity of a name that is proposed for another

PROMPT = "PROMPT"  # the option's value is the argument PROMPT
PROMPT_FILE = "PROMPT_FILE"  # the option's value is a file with it

# Options of llama.cpp and Ollama whose effect is always so or not needed, by the reason. They are taken, with a line
# that says so. The first table's may be followed by on, off or auto, the second's have a value.
_SWITCHES = {
    "is always on": "-cb -fa --cache-prompt --cont-batching --flash-attn --jinja",
    "is always on: a question on the command line is answered alone": "-st --single-turn",
    "is always on: lines that are pasted are one message": "-mli --multiline-input",
    "is always on: texts share the memory for keys and values": "-kvu --kv-unified",
    "is always on: the new text alone is printed": "--no-display-prompt",
    "is always on: the server has /v1/embeddings": "--embedding --embeddings",
    "is always on: the server has /metrics": "--metrics",
    "is not needed: lines break between words in terminals alone": "--nowordwrap",
    "is not needed: messages go to standard error": "--log-disable",
    "is not needed: models read text only": "--no-mmproj",
    "is not needed: weights, keys and values lie where --device runs the model": "-cmoe -nkvo -nopo -nr --cpu-moe "
    "--no-kv-offload --no-op-offload --no-repack",
    "is not needed: nothing is warmed up": "--no-warmup",
    "is not needed: pipes get plain text": "--simple-io",
    "is not needed: weights are read into memory, not mapped": "--mlock --no-mmap",
}
_VALUES = {
    "is not needed: a command keeps its model as long as it runs": "--keepalive",
    "is not needed: all layers run on the device that --device names": "-ncmoe -ngl -ngld -ot --gpu-layers "
    "--gpu-layers-draft --n-cpu-moe --n-gpu-layers --n-gpu-layers-draft --override-tensor",
    "is not needed: layers are split by free memory over the devices that --device names": "-mg -sm -ts --main-gpu "
    "--split-mode --tensor-split",
    "is not needed: --threads is for prompts and drafts, too": "-tb -tbd -td --threads-batch --threads-batch-draft "
    "--threads-draft",
    "is not needed: threads are placed automatically": "-C -Cr --cpu-mask --cpu-range --cpu-strict --numa "
    "--poll --prio",
    "is not needed: the draft's context is as long as the model's": "-cd --ctx-size-draft",
    "is not needed: the tokens of a pass are chosen automatically": "-b -ub --batch-size --ubatch-size",
    "is not needed: what is kept for later texts is chosen automatically": "-ctxcp -sps --cache-reuse "
    "--ctx-checkpoints --slot-prompt-similarity",
}
NEEDLESS = {word: why for why, words in (_SWITCHES | _VALUES).items() for word in words.split()}
WITH_VALUE = " ".join(_VALUES.values()).split()

# Command-line options of llama.cpp, Ollama and vLLM, by what they are here.
_OPTIONS = {
    "--alias": "-a --served-model-name",
    "--color": "-co",
    "--device": "-dev",
    "--draft": "-hfd -hfrd -md --hf-repo-draft --model-draft",
    "--draft-device": "-devd --device-draft",
    "--grammar": "--grammar-file",
    "--keep-alive": "--keepalive",
    "--json-schema": "-j -jf --format --json-schema-file",
    "--max-tokens": "-n --max-new-tokens --n-predict --num-predict --predict",
    "--model": "-hf -hfr --hf-repo",
    "--n-ctx": "--context-length --ctx-size --max-model-len --num-ctx",
    "--parallel": "-np",
    "--repeat-penalty": "--repetition-penalty",
    "--seed": "-s",
    "--stop": "-r --reverse-prompt",
    "--system": "-sys --system-prompt",
    "--temperature": "--temp",
    "--threads": "-t",
    "--timeout": "-to",
    "--typical-p": "--typical",
    PROMPT: "-p --prompt",
    PROMPT_FILE: "-f --file",
    "is --context-overflow here, drop or stop, in chat": "--context-shift --keep --no-context-shift",
    "is --kv here, f16 or q8_0 for keys and values together": "-ctk -ctkd -ctv -ctvd --cache-type-k "
    "--cache-type-k-draft --cache-type-v --cache-type-v-draft",
    "is --kv-memory here, a size such as 2G": "-cram --cache-ram",
    "is --logprobs here, with --json": "--logits-all",
    "is --system @FILE here": "-sysf --system-prompt-file",
    "is --think or --no-think here": "-rea --reasoning",
    "is --think or --no-think here; serve has --reasoning-budget": "--reasoning-budget",
    "is --verbose here in generate, --stats in chat": "-lv -ptc --log-verbosity --perf --print-token-count",
    "is HF_TOKEN in the environment here": "-hft --hf-token",
    "is a path or a hub id here, as --model OWNER/NAME:FILE.gguf": "-mu --model-url",
    "is chosen automatically at each step; --draft names a model": "--draft-max --draft-min",
    "is part of the model's name here, as --model OWNER/NAME:FILE.gguf": "-hff --hf-file",
    "is the command chat here": "-cnv -i -if --conversation --interactive --interactive-first",
    "is the command generate here": "-no-cnv --no-conversation",
    "has no equivalent: --api-key keeps strangers out": "--no-webui",
    "has no equivalent: --device rpc:HOST:PORT,... splits the layers over machines": "--tensor-parallel-size",
    "has no equivalent: --no-think switches thinking off": "--hidethinking",
    "has no equivalent: --temperature is the same for all tokens": "--dynatemp-range",
    "has no equivalent: /metrics says what the server does": "--slots",
    "has no equivalent: a server's /tokenize shows the tokens of a text": "--verbose-prompt",
    "has no equivalent: control tokens are not printed": "-sp --special",
    "has no equivalent: filters have a fixed order": "--sampling-seq",
    "has no equivalent: filters have a fixed order; --temperature-last moves temperature to its end": "--samplers",
    "has no equivalent: merge adapters into the model first": "--lora",
    "has no equivalent: models read text only": "-mm -mmu --mmproj --mmproj-url",
    "has no equivalent: texts always share passes": "-nocb --no-cont-batching",
    "has no equivalent: the model's file says it": "--rope-freq-base --rope-scaling",
    "has no equivalent: the model's own template is used": "--chat-template",
    "has no equivalent: the shell writes them, as in $'two\\nlines'": "-e --escape",
    "has no equivalent: there are --min-p, --top-p and other filters": "--mirostat --top-nsigma",
}
_LETTERS = re.compile("-[A-Za-z]{2,5}")  # an option of llama.cpp, which click would take for several of one letter
_ANY_OBJECT = '{"type": "object"}'  # Ollama's --format json
_SWITCHED, _SWITCH = ("-fa", "--flash-attn"), ("on", "off", "auto", "1", "0")
OPTIONS = {word: ours for ours, words in _OPTIONS.items() for word in words.split()}

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
    "model_path": "the model is the first argument",
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
    "stream": "stream and stream_chat yield the text in pieces",
    "temp": "temperature",
    "threads": "num_threads",
    "use_mmap": "weights are always read into memory",
}

# Words after /set in Ollama's chat.
SETTINGS = {
    "format": "start with --json-schema, which takes a schema",
    "history": "typed lines are kept for later chats; /save FILE saves a conversation",
    "nohistory": "start with PYSTAGED_NOHISTORY=1 in the environment; then typed lines are not kept",
    "nowordwrap": "lines always break between words",
    "quiet": "write /stats off",
    "verbose": "write /stats on",
    "wordwrap": "lines always break between words",
}

# Names of models in Ollama's library, and files on the hub.
MODELS = {
    "deepseek-r1": "unsloth/DeepSeek-R1-0528-Qwen3-8B-GGUF:Q4_K_M",
    "gemma2": "bartowski/gemma-2-9b-it-GGUF:Q4_K_M",
    "gemma3": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    "gemma3:1b": "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
    "gemma3:270m": "bartowski/google_gemma-3-270m-it-GGUF:Q4_K_M",
    "gemma4": "ggml-org/gemma-4-E4B-it-GGUF:Q4_K_M",
    "gpt-oss": "ggml-org/gpt-oss-20b-GGUF",
    "granite4": "ibm-granite/granite-4.0-micro-GGUF:Q4_K_M",
    "lfm2": "LiquidAI/LFM2-1.2B-GGUF:Q4_K_M",
    "llama3.1": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "llama3.2": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "llama3.2:1b": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "mistral": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    "phi4": "bartowski/phi-4-GGUF:Q4_K_M",
    "phi4-mini": "unsloth/Phi-4-mini-instruct-GGUF:Q4_K_M",
    "qwen2.5": "bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder": "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
    "qwen3": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "qwen3:0.6b": "unsloth/Qwen3-0.6B-GGUF:Q4_K_M",
    "qwen3:1.7b": "unsloth/Qwen3-1.7B-GGUF:Q4_K_M",
    "qwen3:4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "qwen3-coder": "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF:Q4_K_M",
    "qwen3.5:4b": "unsloth/Qwen3.5-4B-GGUF:Q4_K_M",
    "smollm3": "ggml-org/SmolLM3-3B-GGUF:Q4_K_M",
    "tinyllama": "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M",
}

# HTTP paths of Ollama, LM Studio and llama-server.
_MANAGE = "models are managed by `pystaged pull` and `pystaged models remove`"
ADDRESSES = {
    **{f"/api/{each}": _MANAGE for each in ("pull", "push", "create", "copy", "delete")},
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

# Words in pydantic's messages, and plain ones.
_WORDS = [
    (r"^Value error, ", ""),
    (r"^Field required$", "is missing"),
    (r"^Extra inputs are not permitted$", "is unknown"),
    (r"^Unable to extract tag using discriminator '(\w+)'.*", r"has no '\1' that says what it is"),
    (r"^(Input|String|List|Tuple|Set|Dictionary|Value|Number|Data) should ", "must "),
    (r"greater than or equal to", "at least"),
    (r"less than or equal to", "at most"),
    (r"less than", "below"),
    (r"\ba valid integer\b", "an integer"),
    (r"\ba valid (\w)", r"a \1"),
    (r"\ba dictionary\b.*", "an object"),
    (r"\ba boolean\b.*", "true or false"),
    (r", (?:unable to|got) .*", ""),
    (r" after validation", ""),
]


def hub_id(name: str) -> str:
    """Convert an address on the hub, or a name in MODELS, to a hub id, owner/name or owner/name:FILE; return what is
    neither unchanged.

    Raises ValueError for an address of anything else than a model, or of another branch than main.
    """
    address = _HUB_ADDRESS.fullmatch(name)
    if not address:
        usual, _, tag = name.lower().partition(":")
        hub = MODELS.get(usual, "")
        return hub if hub and (tag in ("", "latest") or f"-{tag}-" in hub.lower()) else MODELS.get(name.lower(), name)
    found = _HUB_MODEL.fullmatch(unquote(address[1] or "").rstrip("/"))
    if not found:
        raise ValueError(
            f"{name} is not the address of a model; give hf.co/OWNER/NAME, hf.co/OWNER/NAME:TYPE, "
            "or hf.co/OWNER/NAME/blob/main/FILE.gguf"
        )
    return ":".join(filter(None, found.groups()))


def usual_names(like: str) -> str:
    """Words for the names in MODELS that differ from a name by their tag alone, or for some of all."""
    found = [each for each in MODELS if each.partition(":")[0] == like.lower().partition(":")[0]]
    return f"a usual name: {', '.join(found)}" if found else "a usual name such as llama3.2 or qwen3"


def meant(word: str, ours: Iterable[str]) -> str | None:
    """The name among `ours` that a mistyped one is likely to mean, or None."""
    bare = {each.lstrip("-"): each for each in ours}  # dashes would make all options alike
    word = word.lstrip("-")
    beginning = [each for each in bare if len(word) > 3 and each.startswith(word)]
    return bare.get(next(iter(beginning or get_close_matches(word, bare, 1, _ALIKE)), ""))


def plainly(message: str) -> str:
    """Reword a message so that it can follow the name of the value."""
    for theirs, ours in _WORDS:
        message = re.sub(theirs, ours, message)
    return message


def unknown(word: str, options: Iterable[str]) -> str:
    """A sentence about a word that is none of a command's options."""
    ours = {each: each for each in options if each.startswith("--")}
    ours |= {theirs: own for theirs, own in OPTIONS.items() if own in ours}
    likely = meant(word, ours)
    return f"there is no option {word}{f'; did you mean {ours[likely]}?' if likely else ''}"


def in_our_words(
    args: Sequence[str], options: Mapping[str, bool], command: str, *, takes_prompt: bool
) -> tuple[list[str], str]:
    """A command's arguments with our names of options, and a line about those that are not needed, if any.

    Args:
        options: the command's own, and whether a value follows.
        takes_prompt: whether one of its arguments is a prompt.

    Raises:
        LookupError: there are no such options; names all of them.
    """
    found, prompts, refused = list[str](), list[str](), list[str]()
    needless: dict[str, list[str]] = {}  # by reason
    rest = list(reversed(args))
    while rest:
        arg = rest.pop()
        word, equals, value = arg.partition("=")
        if word.startswith("--") and word not in options:
            word = word.replace("_", "-")
        following = rest[-1] if rest else ""
        ours = word if word in options else OPTIONS.get(word, "")
        if word == "--format" and (value or following) == "json":
            value, rest[-1:] = (_ANY_OBJECT, rest[-1:]) if equals else ("", [_ANY_OBJECT])
        if word == "--":
            prompts[:0], rest = reversed(rest), []
        elif ours == "--color" and ours in options and not equals and following[:1] in ("", "-"):
            found += [ours, "stages"]  # a switch in llama.cpp
        elif ours in options:
            found.append(ours + equals + value)
            if rest and not equals and options[ours]:
                found.append(rest.pop())
        elif ours in (PROMPT, PROMPT_FILE) and takes_prompt and (equals or rest):
            from pystaged.options.words import read_text  # noqa: PLC0415  slow to import

            value = value if equals else rest.pop()
            prompts.append(value if ours == PROMPT else read_text(value).removesuffix("\n"))
        elif word in NEEDLESS:
            needless.setdefault(NEEDLESS[word], []).append(word)
            if rest and not equals and (word in WITH_VALUE or (word in _SWITCHED and following in _SWITCH)):
                rest.pop()
        elif ours == f"is the command {command} here":
            pass
        elif ours.startswith("--"):
            refused.append(f"{word} is {ours} here, and {command} has none")
        elif ours and ours not in (PROMPT, PROMPT_FILE):
            refused.append(f"{word} {ours}")
        elif word.startswith("--") or _LETTERS.fullmatch(word):
            refused.append(unknown(word, options))
        else:
            found.append(arg)
    if refused:
        raise LookupError("; ".join(refused))
    told = (f"{', '.join(words)} {'are' if words[1:] else 'is'}{why[2:]}" for why, words in needless.items())
    return [*found, *(["--", *prompts] if prompts else [])], "; ".join(told)
