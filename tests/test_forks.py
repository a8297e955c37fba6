"""An engine in a child of fork(), which has none of its threads: each call says so, and nothing hangs or crashes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.children import forks, in_child
from support.commands import run_python
from support.scheduling import HeldPolicy

import pystaged
from pystaged.decoding.async_stream import AsyncStream
from pystaged.decoding.readers import pieces
from pystaged.options.config import GenerationConfig

PROMPT = "the tree then "
SAYS = "load the model in the child, or use spawn"


async def read(stream: AsyncStream) -> None:
    async with stream:
        await anext(stream)


@forks
def test_every_call_in_a_child_is_refused(random_gguf: Callable[..., Path]) -> None:
    path, policy = random_gguf("F32", context=512), HeldPolicy()
    policy.go_on.set()
    with pystaged.load(path, draft=None) as engine:
        alone = engine.generate(PROMPT, max_tokens=20).tokens
    with pystaged.load(path, policy=policy) as engine:
        begun, unread = (engine.stream(PROMPT, max_tokens=20) for _ in range(2))
        config = GenerationConfig(max_tokens=20)
        batch, unread_batch = (pieces([engine.start(PROMPT, config)]) for _ in range(2))
        next(batch)
        next(begun)
        later = engine.astream(PROMPT)
        policy.go_on.clear()
        running = threading.Thread(target=engine.generate, args=[PROMPT], daemon=True)
        running.start()
        assert policy.reached.wait(600)

        def is_refused() -> bool:
            calls: list[Callable[[], object]] = [
                partial(engine.generate, PROMPT),
                partial(engine.generate, [PROMPT, "a"], n=2),
                partial(engine.generate, PROMPT, regex="a"),
                partial(engine.stream, PROMPT),
                partial(engine.astream, PROMPT),
                partial(engine.chat, [{"role": "user", "content": "a"}]),
                partial(engine.stream_chat, [{"role": "user", "content": "a"}]),
                partial(engine.score, PROMPT),
                partial(engine.embed, [PROMPT]),
                *(partial(next, each) for each in (begun, unread, batch, unread_batch)),
                begun.finish,
                lambda: asyncio.run(read(later)),
            ]
            for call in calls:
                with pytest.raises(RuntimeError, match=SAYS):
                    call()
            for close in (begun.close, unread.close, batch.close, engine.close):
                close()
            with pystaged.load(path, draft=None) as own:
                return own.generate(PROMPT, max_tokens=20).tokens == alone

        refused = in_child(is_refused)
        policy.go_on.set()
        running.join(600)
        assert refused
        assert begun.finish().tokens == unread.finish().tokens == alone


@forks
@pytest.mark.slow
def test_a_child_has_grammars_of_its_own(random_gguf: Callable[..., Path]) -> None:
    """Also where its parent has compiled some."""
    pytest.importorskip("llguidance")
    path = random_gguf("F32", context=512)

    def text(expression: str) -> str:
        with pystaged.load(path, draft=None) as engine:
            return engine.generate(PROMPT, max_tokens=20, regex=expression).text

    assert text("yes") == "yes"
    assert in_child(lambda: text("no") == "no")


EXIT = """
import os, sys
import pystaged

options = {"draft": None, "policy": pystaged.FixedPolicy(2, 3, 6)}
engine = pystaged.load(sys.argv[1], prompt_cache=sys.argv[2], **options)
streams = [engine.stream("the tree", max_tokens=400) for _ in range(4)]
streams.append(pystaged.stream("the tree", model=sys.argv[1], max_tokens=400, **options))
for stream in streams:
    next(stream)
messages = [{"role": "user", "content": "a"}]
rendered = engine.chat_format.render(messages)
child = os.fork()
if child == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print({len(stream.finish().tokens) for stream in streams}, engine.chat_format.render(messages) == rendered)
"""


@forks
def test_a_child_that_uses_nothing_ends_as_it_would(random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    done = run_python(EXIT, random_gguf("F32", context=512), tmp_path, PYTHONWARNINGS="ignore")
    assert (done.stdout, done.stderr) == ("7\n{400} True\n", "")
