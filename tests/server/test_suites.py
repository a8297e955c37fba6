"""Public programs that speak to servers of OpenAI's kind, or load models by our adapters. They have many dependencies:
PYSTAGED_CLIENTS names a Python that has them and pystaged (pip install instructor litellm llm llm-comply "lm-eval[api]"
ollama schemathesis); without, they are skipped. llama.cpp's tests of its server are run where PYSTAGED_LLAMA_CPP names
its sources; they need their requirements.txt."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import paths
from support.server import NAME, Server, live

import pystaged
from pystaged.engine import Engine

PYTHON = os.environ.get("PYSTAGED_CLIENTS", sys.executable)
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
WORDS = ["the", "tree", "then", "over", "and", "out", "or", "in", "of", "one", "two", "stone", "river", "house", "slow"]
Items = tuple[Path, list[dict[str, Any]]]

pytestmark = pytest.mark.slow


def run(module: str, *arguments: str, folder: Path | None = None, **environment: str) -> str:
    """What a module of a client says. Skips where it is not installed."""
    check = subprocess.run([PYTHON, "-c", f"import {module.partition(' ')[0]}"], capture_output=True, check=False)
    if check.returncode:
        pytest.skip(f"{module} is not installed")
    with tempfile.TemporaryDirectory() as empty:  # some leave files where they run
        done = subprocess.run(
            [PYTHON, *arguments],
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
            cwd=folder or empty,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | OFFLINE | environment,
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Engine]:
    with pystaged.load(paths.smollm2(), n_ctx=1024, recycle=False, report=lambda _: None) as engine:
        yield engine


LITELLM = """
import asyncio, litellm, sys
litellm.suppress_debug_info = True
options = dict(model="openai/tiny", api_base=sys.argv[1] + "/v1", api_key="none", temperature=0, max_tokens=12)
messages = [{"role": "user", "content": "Hello"}]
whole = litellm.completion(messages=messages, **options)
text = whole.choices[0].message.content
assert whole.usage.completion_tokens == 12
parts = litellm.completion(messages=messages, stream=True, **options)
assert "".join(part.choices[0].delta.content or "" for part in parts) == text
async def work():
    return await asyncio.gather(*(litellm.acompletion(messages=messages, **options) for _ in range(3)))
assert [each.choices[0].message.content for each in asyncio.run(work())] == [text] * 3
old = litellm.text_completion(prompt="the tree", **options | {"model": "text-completion-openai/tiny"})
assert old.usage.completion_tokens == 12
try:
    litellm.completion(messages=messages * 500, **options)
except litellm.ContextWindowExceededError:
    print(text)
"""


def test_litellm(server: Server, engine: Engine) -> None:
    said = run("litellm", "-c", LITELLM, server.url, LITELLM_LOCAL_MODEL_COST_MAP="True")
    expected = engine.chat([{"role": "user", "content": "Hello"}], max_tokens=12).text
    assert expected.strip().splitlines()[-1] in said


INSTRUCTOR = """
import instructor, openai, sys
from typing import Literal
from pydantic import BaseModel
class Answer(BaseModel, extra="forbid"):  # a small model would not stop to add properties
    city: Literal["Rome", "Oslo"]
    size: Literal[1, 2, 3]
for mode in (instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none"), mode=mode)
    asked = [{"role": "user", "content": "Name a city."}]
    schema = {"type": "json_schema", "json_schema": {"name": "Answer", "schema": Answer.model_json_schema()}}
    # A small model does not keep to a schema that it is only told of.
    more = {"extra_body": {"response_format": schema}} if mode is instructor.Mode.JSON else {}
    found = client.chat.completions.create(
        model="bundled", response_model=Answer, messages=asked, max_retries=0, temperature=0, max_tokens=100, **more
    )
    print(mode, found)
"""


def test_instructor(smollm2: Engine) -> None:
    with live(smollm2) as server:
        assert run("instructor", "-c", INSTRUCTOR, server.url).count("city=") == 3


OLLAMA = """
import ollama, sys
client = ollama.Client(sys.argv[1])
hello, options = [{"role": "user", "content": "Hello"}], {"temperature": 0, "num_predict": 4}
whole = client.chat("tiny", hello, options=options)
assert whole.done and whole.done_reason == "length" and whole.eval_count == 4
parts = client.chat("tiny", hello, options=options, stream=True)
assert "".join(part.message.content for part in parts) == whole.message.content
def weather(place: str) -> str:
    return "Sun"
call = r'<tool_call>\\n{\\"name\\": \\"weather\\", \\"arguments\\": {\\"place\\": \\"Rome\\"}}\\n</tool_call>'
called = client.chat("tiny", hello, tools=[weather], options={"num_predict": 200, "grammar": f'root ::= "{call}"'})
(call,) = called.message.tool_calls
assert (call.function.name, call.function.arguments) == ("weather", {"place": "Rome"})
messages = [*hello, called.message, {"role": "tool", "content": weather("Rome"), "tool_name": "weather"}]
assert client.chat("tiny", messages, options=options).message.content
assert client.generate("tiny", "Hello", options=options).response == whole.message.content
assert client.list().models[0].model == "tiny"
assert len(client.embed("tiny", ["Hello", "Bye"]).embeddings) == 2
assert "completion" in client.show("tiny").capabilities
try:
    client.chat("tiny", [{"role": "user", "content": "Hello" * 2000}])
except ollama.ResponseError as error:
    assert error.status_code == 400 and "context length" in error.error
    print(whole.message.content)
"""


def test_ollama(smollm2: Engine) -> None:
    with live(smollm2) as server:
        expected = smollm2.chat([{"role": "user", "content": "Hello"}], max_tokens=4).text
        assert run("ollama", "-c", OLLAMA, server.url).strip() == expected.strip()


def test_llm_with_an_address_of_its_own(server: Server, engine: Engine, tmp_path: Path) -> None:
    model = {"model_id": "mine", "model_name": NAME, "api_base": f"{server.url}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
    (tmp_path / "keys.json").write_text(json.dumps({"openai": "none"}))
    for more in ([], ["--no-stream"]):
        options = ["-o", "temperature", "0", "-o", "max_tokens", "12", *more, "Hello"]
        said = run("llm", "-m", "llm", "-m", "mine", *options, LLM_USER_PATH=str(tmp_path))
        assert said.strip() == engine.chat([{"role": "user", "content": "Hello"}], max_tokens=12).text.strip()


@pytest.mark.parametrize(("form", "count"), [("openai-chat", 7), ("open-responses", 9), ("anthropic", 6)])
def test_llm_comply(smollm2: Engine, form: str, count: int) -> None:
    """All of its cases, without images, compaction and those that are for certain models."""
    cases = ["basic-response", "system-prompt", "multi-turn", "tool-calling", "streaming-response", "streaming-usage"]
    more = {"openai-chat": ["error-handling"], "anthropic": []}
    cases += more.get(form, ["error-handling", "assistant-phase", "response-output-phase-schema"])
    prefix = {"openai-chat": "chat-", "anthropic": "anth-"}.get(form, "")
    program = str(Path(PYTHON).parent / "llm-comply")
    with live(smollm2, strict=True, defaults={"temperature": 0}) as server:
        code = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
        options = ["--format", form, "-u", f"{server.url}/v1", "-k", "x", "-m", NAME, "--json"]
        said = run("llm_comply", "-c", code, program, *options, "-f", ",".join(f"{prefix}{case}" for case in cases))
    assert json.loads(said)["summary"] == {"total": count, "passed": count, "failed": 0, "skipped": 0}


def test_schemathesis(engine: Engine) -> None:
    program = str(Path(PYTHON).parent / "st")
    code = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    checks = ["--checks", "not_a_server_error,response_schema_conformance", "--request-timeout", "600"]
    with live(engine, defaults={"max_tokens": 16}) as server:  # it asks for 127 texts
        run("schemathesis", "-c", code, program, "run", f"{server.url}/openapi.json", "--max-examples", "50", *checks)


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Items:
    """The folder of a task of 100 questions with four answers each, and these."""
    folder = tmp_path_factory.mktemp("task")
    chooses = random.Random(1)

    def words(n: int) -> str:
        return " ".join(chooses.choice(WORDS) for _ in range(n))

    items = [
        {"question": words(chooses.randrange(3, 20)), "choices": [words(n) for n in (1, 2, 2, 3)], "answer": i % 4}
        for i in range(100)
    ]
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, items)))
    task: dict[str, Any] = {"task": "tiny", "dataset_path": "json", "test_split": "test"}
    task |= {"output_type": "multiple_choice", "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}}}
    task |= {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    scores = ("acc", "acc_norm")
    task["metric_list"] = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in scores]
    (folder / "tiny.yaml").write_text(json.dumps(task))
    return folder, items


def sums(engine: Engine, item: dict[str, Any]) -> list[float]:
    """The log-probability of each answer after its question, computed here."""
    length = len(engine.encode(item["question"]))
    scores = [engine.score(f"{item['question']} {choice}") for choice in item["choices"]]
    return [sum(score.logprobs[length:].tolist()) for score in scores]


@pytest.mark.parametrize("way", ["single", "batched", "gguf", "own, 1", "own, 16"])
def test_lm_eval(server: Server, engine: Engine, items: Items, tmp_path: Path, way: str) -> None:
    folder, asked = items
    program, environment = "lm_eval", {}
    if way.startswith("own"):
        program, environment = "pystaged.integrations.lm_eval", {"PYTHONPATH": str(Path(pystaged.__file__).parents[1])}
        arguments = f"model={engine._bundle.path},recycle=False,draft=none"
        model = ["--model", "pystaged", "--model_args", arguments, "--batch_size", way.rpartition(" ")[2]]
    elif way == "gguf":
        model = ["--model", "gguf", "--model_args", f"base_url={server.url}"]
    else:
        at_once, batch = {"single": (1, 1), "batched": (4, 8)}[way]
        arguments = f"base_url={server.url}/v1/completions,model={NAME},tokenizer_backend=remote,max_length=512"
        arguments += f",num_concurrent={at_once}"
        model = ["--model", "local-completions", "--model_args", arguments, "--batch_size", str(batch)]
    options = ["--tasks", "tiny", "--include_path", str(folder), "--log_samples", "--output_path", str(tmp_path)]
    cache = {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run("lm_eval", "-m", program, "run", *model, *options, **cache, **environment)
    (results,) = tmp_path.rglob("results*.json")
    (samples,) = tmp_path.rglob("samples*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    found.sort(key=lambda sample: sample["doc_id"])
    right = 0
    for item, sample in zip(asked, found, strict=True):
        expected = sums(engine, item)
        scored = [float(each[0][0]) for each in sample["resps"]]
        assert scored == (expected if way.startswith("own") else pytest.approx(expected, rel=1e-6))
        right += expected.index(max(expected)) == item["answer"]
    scores = json.loads(results.read_text())["results"]["tiny"]
    assert scores["acc,none"] == pytest.approx(right / 100, abs=1e-6)


LEFT_OUT: dict[str, list[str]] = dict(paths.table("left_out"))  # why, and which
FILES = ("tokenize", "chat_completion", "completion", "metrics", "compat_anthropic", "compat_oai_responses")
# A conversation in which the assistant speaks twice is refused there.
TWICE = "unit/test_chat_completion.py::test_invalid_chat_completion_req[messages7]"
SKIPPED = '@pytest.mark.skip(reason="This test fails on linux, need to be fixed")\n'


def test_llama_cpp(tmp_path: Path) -> None:
    """Its own tests of its server; that a prompt in the cache makes no difference, which it skips, too."""
    source = Path(os.environ.get("PYSTAGED_LLAMA_CPP", "")) / "tools" / "server" / "tests"
    if not source.is_dir():
        pytest.skip("PYSTAGED_LLAMA_CPP names no sources of llama.cpp")
    folder = tmp_path / "tests"
    shutil.copytree(source, folder)
    completions = folder / "unit" / "test_completion.py"
    completions.write_text(completions.read_text().replace(SKIPPED, ""))
    names = [f"::{name}[" for each in LEFT_OUT.values() for name in each]
    with (folder / "conftest.py").open("a") as file:
        file.write(f"\ndef pytest_collection_modifyitems(items):\n    left_out = {names!r}\n")
        file.write('    items[:] = [each for each in items if not any(n in each.nodeid + "[" for n in left_out)]\n')
    options = ["-q", "-p", "no:cacheprovider", "--deselect", TWICE, *(f"unit/test_{name}.py" for name in FILES)]
    told: Any = {"defaults": {"max_tokens": 64, "seed": 42}, "metrics_prefix": "llamacpp:"}
    model = pystaged.load(paths.smollm2(), n_ctx=256, recycle=False, report=lambda _: None)
    with model as engine, live(engine, **told) as server:
        said = run("requests", "-m", "pytest", *options, folder=folder, DEBUG_EXTERNAL="1", PORT=str(server.port))
    assert re.search(r"\b[6-9]\d passed", said), said
