"""The plugin for pytest, in projects of its own users."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
from support import paths
from support.kernels import KERNELS

import pystaged
from pystaged import Receipt

pytest_plugins = ["pytester"]

# An application that knows OpenAI's client alone.
TESTS = """
import openai
import pytest

def complete(url, prompt, **options):
    with openai.OpenAI(base_url=url, api_key="none") as client:
        return client.completions.create(model="any", prompt=prompt, max_tokens=12, **options).choices[0].text

@pytest.mark.parametrize("prompt", ["def fibonacci(n):", "import os/", "class A:"])
def test_app(local_llm_url, assert_same_text, prompt):
    assert_same_text(complete(local_llm_url, prompt, extra_body={"temperature": 1}))
    assert_same_text(complete(local_llm_url, prompt, temperature=0).strip(), "stripped")

class TestOwn:
    def test_texts(self, local_llm_url, assert_same_text):
        for _ in range(2):
            assert_same_text(complete(local_llm_url, "def f(x):", temperature=0.8, seed=3, logit_bias={5: -1.5}))

def test_other():
    pass
"""
# An application that asks a model to answer; each question twice, so that the second prompt is in the cache.
APPLICATION = """
import openai
import pytest

PROMPTS = [
    "Why is the sky blue?",
    "Name three colours.",
    "Write a haiku about rain.",
    "Translate 'good morning' into French.",
    "What is 17 plus 25?",
    "Summarize in one sentence: Water boils at 100 degrees Celsius at sea level, and at less on a mountain.",
    "Write a Python function that reverses a string.",
    "List the days of the week.",
    "Is this review friendly? 'The food was cold and the waiter rude.' Answer yes or no.",
    "Reply with JSON: a person's name and age.",
]

@pytest.mark.parametrize("i", range(len(PROMPTS)))
def test_answers(local_llm_url, assert_same_text, i):
    with openai.OpenAI(base_url=local_llm_url, api_key="none") as client:
        def answer():
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPTS[i]}]
            options = {"temperature": 0.0 if i % 2 else 0.9, "max_tokens": 20}
            return client.chat.completions.create(model="any", messages=messages, **options).choices[0].message.content
        text = answer()
        assert answer() == text
    assert_same_text(text)
"""
FILES = {
    f"test_it/{name}.json"
    for prompt in ("def%20fibonacci(n)%3A", "import%20os%2F", "class%20A%3A")
    for name in (f"test_app[{prompt}]", f"test_app[{prompt}]-stripped")
} | {"test_it/TestOwn.test_texts.json", "test_it/TestOwn.test_texts-2.json"}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose model is the bundled one; the plugin is loaded whether or not it is installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p pystaged.integrations.pytest")
    monkeypatch.delenv("CI", raising=False)
    pytester.makeini("[pytest]\npystaged_model = bundled\npystaged_n_ctx = 512\naddopts = --strict-markers")
    return pytester


def kept(project: pytest.Pytester) -> dict[str, str]:
    folder = project.path / "receipts"
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.json")}


def one(project: pytest.Pytester, prompt: str = "def f(x):", text: str = "text", **options: object) -> None:
    """A test of one text, of which `text` is made."""
    given = {"prompt": prompt, "max_tokens": 8, "temperature": 0} | options
    project.makepyfile(
        test_it="import json, urllib.request\n"
        "def test_one(local_llm_url, assert_same_text):\n"
        f"    data = json.dumps({given!r}).encode()\n"
        "    with urllib.request.urlopen(local_llm_url + '/completions', data) as answer:\n"
        "        text = json.load(answer)['choices'][0]['text']\n"
        f"    assert_same_text({text})\n"
    )


@pytest.mark.slow
def test_texts_are_kept_and_are_the_same_in_any_order(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=TESTS)
    project.runpytest_subprocess().assert_outcomes(failed=4, passed=1)
    assert kept(project) == {}
    project.runpytest_subprocess("--pystaged-update").assert_outcomes(passed=5)
    files = kept(project)
    assert files.keys() == FILES
    for text in files.values():
        assert Receipt.from_json(text).n_ctx == 512
    names = [f"test_it.py::{name}" for name in ("TestOwn", "test_app[class A:]", "test_app[import os/]")]
    project.runpytest_subprocess(*names).assert_outcomes(passed=3)
    project.runpytest_subprocess("--pystaged-update", "-k", "not fibonacci").assert_outcomes(passed=4)
    assert kept(project) == files


@pytest.mark.slow
def test_an_application_is_answered_alike(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after anything is cached, by four processes at once, and with every kernel."""
    pytest.importorskip("xdist")
    paths.smollm2()
    monkeypatch.setenv("XDG_CACHE_HOME", str(project.mkdir("cache")))
    project.makeini("[pytest]\npystaged_n_ctx = 512")
    project.makepyfile(test_it=APPLICATION)
    project.runpytest_subprocess("--pystaged-update").assert_outcomes(passed=10)
    receipts = [json.loads(text)["receipt"] for text in kept(project).values()]
    assert len({receipt["text"]["sha256"] for receipt in receipts}) == 10
    project.runpytest_subprocess("-p", "xdist.plugin", "-n4").assert_outcomes(passed=10)
    for kernel in KERNELS:
        monkeypatch.setenv("PYSTAGED_KERNEL", kernel)
        some = ["test_it.py::test_answers[4]"] if kernel == "scalar" else []  # it is 50 times slower
        project.runpytest_subprocess(*some).assert_outcomes(passed=len(some) or 10)


def test_a_difference_is_explained(project: pytest.Pytester) -> None:
    one(project, temperature=1.5, seed=1)
    project.runpytest_subprocess("--pystaged-update").assert_outcomes(passed=1)
    ((name, before),) = kept(project).items()
    receipt = Receipt.from_json(before)
    with pystaged.load("bundled", n_ctx=512, recycle=False, report=lambda _: None) as engine:
        assert (receipt.prompt, pystaged.repeat(engine, receipt)) == (tuple(engine.encode("def f(x):").tolist()), None)
        assert hashlib.sha256(json.loads(before)["text"].encode()).hexdigest() == receipt.text_sha256
        other = engine.generate("def f(x):", max_tokens=8)
        at = next(i for i in range(8) if receipt.tokens[i] != other.tokens[i])
        begun = [*receipt.prompt, *other.tokens[:at]]
        chances = [engine.score([*begun, token]).logprobs[-1] for token in (receipt.tokens[at], other.tokens[at])]
    # Earlier versions kept log-probabilities, too.
    (project.path / "receipts" / name).write_text(json.dumps(json.loads(before) | {"logprobs": [-1.0] * 8}))
    project.runpytest_subprocess().assert_outcomes(passed=1)
    one(project)
    failed = project.runpytest_subprocess()
    failed.assert_outcomes(failed=1)
    was, now = (f"{2.718281828459045**each:.2g}" for each in chances)
    failed.stdout.fnmatch_lines(
        [
            "*the text differs from the one in receipts/test_it/test_one.json",
            f"*token {at + 1} was '*' (probability {was} now) and is '*' (probability {now} now)",
            "*then: *",
            "*now: *",
            "*What differs: seed (1 then, 0 now); temperature (1.5 then, 0.0 now).",
            "*If the new text is right, keep it with pytest --pystaged-update.",
        ]
    )
    one(project, "def g(y, z):", temperature=1.5, seed=1)
    project.makeini("[pytest]\npystaged_model = bundled\npystaged_n_ctx = 256\npystaged_kv = q8_0")
    failed = project.runpytest_subprocess()
    differs = "the prompt (* tokens then, * now, the first * are the same)"
    failed.stdout.fnmatch_lines([f'*What differs: {differs}; kv ("f16" then, "q8_0" now); n_ctx (512 then, 256 now).'])


def test_what_the_application_makes_of_a_text(project: pytest.Pytester) -> None:
    """Such a text has no receipt, whatever the model wrote before."""
    one(project, text="text.replace(' ', '-')")
    project.runpytest_subprocess("--pystaged-update").assert_outcomes(passed=1)
    one(project, text="text.replace(' ', '+')")
    failed = project.runpytest_subprocess()
    reason = "neither text has a receipt, because the model did not write exactly that string."
    failed.stdout.fnmatch_lines([f"*What differs is unknown: {reason}"])
    assert json.loads(kept(project)["test_it/test_one.json"])["receipt"] is None


def test_another_model_is_named(project: pytest.Pytester, random_gguf: object) -> None:
    one(project)
    project.runpytest_subprocess("--pystaged-update").assert_outcomes(passed=1)
    path = random_gguf("F32", context=512)  # type: ignore[operator]
    failed = project.runpytest_subprocess(f"--pystaged-model={path}")
    failed.stdout.fnmatch_lines([f'*What differs: *; file ("target.Q8_0.gguf" then, "{path.name}" now); *sha256 (*'])


def test_a_model_that_is_missing(project: pytest.Pytester) -> None:
    one(project)
    failed = project.runpytest_subprocess("--pystaged-model=nonsense")
    failed.assert_outcomes(errors=1)
    failed.stdout.fnmatch_lines(
        ["the local model cannot be used: there is no model file nonsense*", "Settings: pystaged_model = nonsense, *"]
    )
    failed.stdout.no_fnmatch_line("*During handling*")
    refused = project.runpytest_subprocess("-o", "pystaged_n_ctx=many")
    refused.stdout.fnmatch_lines(["the local model cannot be used: *'many'", "Settings: *, pystaged_n_ctx = many, *"])


def test_a_file_that_is_no_kept_text(project: pytest.Pytester) -> None:
    one(project)
    failed = project.runpytest_subprocess()
    failed.stdout.fnmatch_lines(["*no text is kept yet in receipts/test_it/test_one.json; if this text is right, *"])
    (project.mkdir("receipts") / "test_it").mkdir()
    (project.path / "receipts" / "test_it" / "test_one.json").write_text("{}")
    failed = project.runpytest_subprocess()
    failed.stdout.fnmatch_lines(["*no kept text (damaged, or a merge conflict?): receipts/test_it/test_one.json; *"])
    for options in (["--pystaged-update"], []):
        project.runpytest_subprocess(*options).assert_outcomes(passed=1)


def test_what_is_refused(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    project.makepyfile(test_it="def test_one(assert_same_text):\n    assert_same_text(None)\n")
    project.runpytest_subprocess().stdout.fnmatch_lines(["*TypeError: assert_same_text takes a string, not NoneType"])
    monkeypatch.setenv("CI", "true")
    refused = project.runpytest_subprocess("--pystaged-update")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: --pystaged-update is not for CI*"])


def test_other_projects_notice_nothing(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_it="import sys\n"
        "def test_it():\n"
        "    assert 'pystaged._core' not in sys.modules and 'numpy' not in sys.modules\n"
        "def test_model(local_llm_url): raise AssertionError\n"
    )
    done = project.runpytest_subprocess("-m", "not local_llm", "--pystaged-model=nonsense")
    done.assert_outcomes(passed=1, deselected=1)


def _is_alive(port: int) -> bool:
    with suppress(OSError), closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


@pytest.mark.slow
def test_workers_share_a_server_that_ends_with_them(project: pytest.Pytester, tmp_path: Path) -> None:
    """It ends also if the run is killed."""
    pytest.importorskip("xdist")
    project.makepyfile(
        test_it="import os, pathlib, pytest, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "@pytest.mark.parametrize('n', range(2))\n"
        "def test_it(local_llm_url, n):\n"
        "    (folder / f'{n}.part').write_text(f'{os.getpid()} {local_llm_url}')\n"
        "    (folder / f'{n}.part').rename(folder / str(n))\n"
        "    while 'WAIT' in os.environ: time.sleep(1)\n"
    )
    arguments = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-n2", f"--basetemp={tmp_path / 'run'}"]
    running = subprocess.Popen(arguments, cwd=project.path, env=os.environ | {"WAIT": "1"})
    try:
        deadline = time.monotonic() + 300
        while not all((tmp_path / str(n)).exists() for n in range(2)):
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        said = [(tmp_path / str(n)).read_text().split() for n in range(2)]
        (port,) = {int(url.split(":")[2].split("/")[0]) for _, url in said}
        assert len({url for _, url in said}) == 2
        assert _is_alive(port)
    finally:
        running.kill()
        running.wait()
    for process, _ in said:
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    while _is_alive(port):
        assert time.monotonic() < deadline
        time.sleep(0.05)
