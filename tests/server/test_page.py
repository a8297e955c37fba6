"""The page, in a real browser, at a phone's and a desk's width, in the light and the dark.

PYSTAGED_SCREENSHOTS names a folder for pictures to look at.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support import paths
from support.browser import chromium
from support.scheduling import is_idle, wait_until
from support.server import NAME, Server, live

import pystaged
from pystaged.engine import Engine
from pystaged.options.config import SamplingConfig
from pystaged.server.run import bound

pytestmark = pytest.mark.slow
SIZES = {"phone": (390, 844), "desk": (1280, 800)}
desk = pytest.mark.parametrize("page", ["desk"], indirect=True)
ANSWER = "tell me <b>more</b>"


@pytest.fixture(scope="module")
def engine(bundled_target: Path) -> Iterator[Engine]:
    with pystaged.load(bundled_target, draft="none", recycle=False, report=lambda _: None) as engine:
        yield engine


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(params=SIZES)
def page(browser: Any, server: Server, request: pytest.FixtureRequest) -> Iterator[Page]:
    page = Page(browser, request.param)
    browser.get(server.url)
    browser.execute_script("sessionStorage.clear()")
    browser.get(server.url)
    yield page
    said = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert all(page.expected and page.expected in each for each in said)


class Page:
    """What a person sees and does."""

    def __init__(self, browser: Any, size: str) -> None:
        self.browser, self.size = browser, size
        self.expected = ""  # what the browser may complain of
        # Headless windows are no smaller than 500 points, phones are.
        width, height = SIZES[size]
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"},
        )

    def one(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def ask(self, text: str) -> None:
        self.one("#ask").send_keys(text)
        self.one("#send").click()

    def choose(self, **settings: str) -> None:
        if not self.one("#settings").is_displayed():
            self.one("#show-settings").click()
        for name, value in settings.items():
            self.one(f"#{name}").clear()
            self.one(f"#{name}").send_keys(value)
        self.one("#show-settings").click()

    def wait(self, condition: Callable[[], object]) -> None:
        wait_until(condition)

    def is_done(self) -> bool:
        return self.one("#send").text == "Send"

    def turns(self) -> list[dict[str, Any]]:
        return list(self.script("return turns"))

    def script(self, code: str, *arguments: Any) -> Any:
        return self.browser.execute_script(code, *arguments)

    def seed(self, *turns: dict[str, Any]) -> None:
        """A conversation that was kept."""
        self.script("sessionStorage.setItem('turns', arguments[0])", json.dumps(turns))
        self.browser.refresh()

    def shot(self, name: str) -> None:
        folder = os.environ.get("PYSTAGED_SCREENSHOTS")
        if folder:
            for scheme in ("light", "dark"):
                self.browser.execute_cdp_cmd(
                    "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
                )
                self.browser.save_screenshot(str(Path(folder) / f"{name}-{self.size}-{scheme}.png"))

    def overflow(self) -> int:
        """By how much the page is too wide or too high."""
        edges = "document.documentElement.scrollWidth - innerWidth, document.documentElement.scrollHeight - innerHeight"
        return int(self.script(f"return Math.max({edges})"))


def written(*pieces: str, trees: Any = ()) -> dict[str, Any]:
    """An answer, each piece of which a step has written."""
    told = [[text, "draft" if i % 2 else "target", i] for i, text in enumerate(pieces)]
    return {"role": "assistant", "content": "".join(pieces), "pieces": told, "trees": list(trees), "figures": ""}


ASKED = {"role": "user", "content": ANSWER}
MARKDOWN = (paths.DATA / "page.md").read_text("utf-8")
HOSTILE = [
    "<img src=x onerror=hit()><script>hit()</" + "script>",
    "[click](javascript:hit()) [click](JaVaScRiPt:hit()) [data](data:text/html,x) [relative](//x)",
    "```<b>\n</code></pre><img src=x onerror=hit()>\n```",
    "`<i>` **<a href=javascript:hit()>** | <b> |\n|---|---|\n| <svg/onload=hit()> | x |",
]
# Never closed, or repeated. The driver gives up on a page that takes half a minute.
LONG = [mark * 20000 for mark in ("*a ", "`", "[", "a**", "a~~")]
LONG += ["| a " * 5000 + "\n" + "|---" * 5000, "> " * 9000, "- a\n" * 9000]
# In place of the server: what it is to send is given bit by bit.
STAND_IN = """
window.fetch = (path, options) => {
  const body = new ReadableStream({start: (stream) => {
    window.send = (data) => stream.enqueue(new TextEncoder().encode("data: " + data + "\\n\\n"));
    window.say = (event) => send(JSON.stringify(event));
    window.fail = () => stream.error(new TypeError("network error"));
    window.end = () => stream.close();
    options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
  }});
  window.asked = JSON.parse(options.body);
  return Promise.resolve(new Response(body));
};
"""


def piece(text: str) -> dict[str, Any]:
    tree = [{"text": "x", "parent": -1, "stage": "target", "accepted": True}]
    ours = {"pieces": [[text, "target"]], "tree": tree, "texts": 1, "speedup": None}
    return {"choices": [{"delta": {"content": text}, "token_ids": [1], "pystaged": ours, "finish_reason": None}]}


def sampling(engine: Engine, seed: int) -> SamplingConfig:
    """What the page asks for at temperature 1."""
    return SamplingConfig(**{**engine.recommended_sampling, "temperature": 1.0, "seed": seed})


def test_type_stream_and_reload(page: Page, engine: Engine) -> None:
    page.shot("empty")
    messages = [{"role": "system", "content": "Once"}, {"role": "user", "content": ANSWER}]
    answers = (engine.chat(messages, max_tokens=40, sampling=sampling(engine, seed)) for seed in range(1000))
    answer = next(answer for answer in answers if answer.finish_reason == "length" and answer.text.strip())
    expected = answer.text
    page.choose(temperature="1", max_tokens="40", seed=str(answer.seed), system="Once")
    page.ask(ANSWER)
    page.wait(lambda: page.one(".user .words").text)
    page.wait(page.is_done)
    assert page.turns()[1]["content"] == expected
    assert page.one(".user .words").get_attribute("textContent") == ANSWER  # no markup
    shown = page.one(".assistant .words").get_attribute("textContent")
    assert re.findall(r"\w+", shown) == re.findall(r"\w+", expected)
    stages = {each.get_attribute("class") for each in page.all(".assistant .words span[data-step]")}
    assert "target" in stages
    assert stages <= {"target", "n-gram", "draft", "grammar"}
    figures = page.one(".assistant .figures").text
    assert figures.startswith("40 tokens")
    assert figures.endswith(f"seed {answer.seed}; cut at the most tokens")
    page.shot("answer")
    assert page.overflow() <= 0
    page.browser.refresh()
    page.wait(lambda: page.all(".assistant"))
    assert page.turns()[1]["content"] == expected
    assert page.one(".assistant .words").get_attribute("textContent") == shown
    assert page.one("#temperature").get_attribute("value") == "1"
    page.one("#new").click()
    assert not page.all(".turn")
    assert page.one("#empty").is_displayed()


def test_stop(page: Page, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [{"role": "user", "content": "go on"}]
    # Of a text that does not end before it is stopped.
    texts = (engine.chat(asked, max_tokens=900, sampling=sampling(engine, seed)) for seed in range(1000))
    text = next(text for text in texts if len(text.tokens) > 300)
    step, steps, stopped = engine._stepper.step, count(), threading.Event()

    def step_until_stopped(texts: Any) -> Any:
        assert next(steps) < 40 or stopped.wait(600)
        return step(texts)

    monkeypatch.setattr(engine._stepper, "step", step_until_stopped)
    page.choose(temperature="1", max_tokens="900", seed=str(text.seed))
    page.ask("go on")
    page.wait(lambda: page.all(".assistant .words span"))
    assert page.one("#send").text == "Stop"
    page.one("#send").click()
    page.wait(page.is_done)
    stopped.set()
    assert page.one(".assistant .figures").text == "stopped"
    written = page.turns()[1]["content"]
    assert written
    assert text.text.startswith(written)
    page.wait(lambda: is_idle(engine))
    page.browser.refresh()
    assert page.turns()[1]["content"] == written
    page.choose(max_tokens="4")
    page.ask("and on")
    page.wait(lambda: len(page.all(".assistant")) == 2 and page.is_done())
    assert page.all(".assistant .figures")[1].text.startswith("4 tokens")


def test_a_refused_question_goes_back(page: Page) -> None:
    page.choose(temperature="-1")
    page.ask(ANSWER)
    page.wait(page.is_done)
    page.wait(lambda: page.one("#error").is_displayed())
    assert "temperature" in page.one("#error").text
    assert page.one("#ask").get_attribute("value") == ANSWER
    assert page.turns() == []
    page.shot("error")
    page.expected = "400 (Bad Request)"
    page.choose(temperature="1", max_tokens="2")
    page.one("#send").click()
    page.wait(lambda: page.all(".assistant") and page.is_done())
    assert not page.one("#error").is_displayed()
    assert page.one("#ask").get_attribute("value") == ""


def test_a_server_that_wants_a_key(page: Page, engine: Engine) -> None:
    page.expected = "401 (Unauthorized)"
    with live(engine, api_keys=["secret"]) as server:
        page.browser.get(server.url)
        page.ask(ANSWER)
        page.wait(lambda: page.is_done() and page.one("#error").is_displayed())
        assert "API key" in page.one("#error").text
        page.shot("key")
        page.one("#key").send_keys("secret\t")
        page.wait(lambda: page.one("#model").text == NAME)
        page.choose(max_tokens="2")
        page.one("#send").click()
        page.wait(lambda: page.all(".assistant") and page.is_done())
        assert page.one(".figures").text.startswith("2 tokens")


@desk
def test_a_refusal_replaces_nothing(page: Page) -> None:
    page.seed(ASKED, written("old"))
    page.script("fetch = async () => Response.json({error: {message: 'no'}}, {status: 400})")
    page.all(".assistant .below button")[1].click()
    page.wait(lambda: page.is_done() and page.one("#error").is_displayed())
    assert (page.one("#error").text, page.one("#ask").get_attribute("value")) == ("no", "")
    page.all(".user button")[1].click()
    page.ask(" now")
    page.wait(lambda: page.is_done() and page.one("#editing").is_displayed())
    assert page.one("#ask").get_attribute("value") == ANSWER + " now"
    assert [turn["content"] for turn in page.turns()] == [ANSWER, "old"]
    assert [each.text for each in page.all(".words")] == [ANSWER, "old"]
    assert page.one("#error").is_displayed()
    page.one("#ask").send_keys("\ue00c")  # Escape
    assert not page.one("#error").is_displayed()


@pytest.mark.parametrize(
    ("last", "over", "said"),
    [
        ({"finish_reason": "stop"}, 1, ""),
        ({"finish_reason": "length"}, 0, "; cut at the most tokens"),
        ({"finish_reason": "length"}, 1, "; cut where the context is full"),
        ({"finish_reason": "length", "stop_reason": "repetition_detected"}, 0, "; ended where it repeats itself"),
    ],
)
@desk
def test_why_an_answer_ended(page: Page, engine: Engine, last: dict[str, str], over: int, said: str) -> None:
    page.wait(lambda: page.script("return room") == engine.n_ctx)
    page.script(STAND_IN)
    page.ask("a")
    usage = {"completion_tokens": 9, "total_tokens": engine.n_ctx + over}
    page.script("say(arguments[0])", piece("so far"))
    page.script("say(arguments[0])", {"choices": [{"delta": {}, **last}]})
    page.script("say(arguments[0])", {"choices": [], "usage": usage, "timings": {"predicted_per_second": 2}, "seed": 5})
    page.script("send('[DONE]')")
    page.wait(page.is_done)
    assert page.one(".figures").text == "9 tokens, 2.0 per second, seed 5" + said
    assert not page.one("#error").is_displayed()


@pytest.mark.parametrize("how", ["fail", "end"])
@desk
def test_what_was_shown_stays_when_the_line_breaks(page: Page, server: Server, how: str) -> None:
    page.script(STAND_IN)
    page.ask("a")
    for word in ("so ", "far"):
        page.script("say(arguments[0])", piece(word))
    page.wait(lambda: page.one(".assistant .words").text == "so far")
    page.script(f"{how}()")
    page.wait(page.is_done)
    assert page.one(".assistant .words").text == "so far"
    assert page.one(".assistant .figures").text == "broken off"
    assert page.one("#error").text == f"The server at {server.url} does not answer. Regenerate asks again."
    assert [turn["content"] for turn in page.turns()] == ["a", "so far"]


def test_a_server_that_goes_and_comes_back(page: Page, engine: Engine) -> None:
    page.expected = "ERR_CONNECTION_REFUSED"
    with live(engine) as gone:
        page.browser.get(gone.url)
        page.choose(max_tokens="2")
    page.script("at('model').textContent = 'another'")
    page.ask(ANSWER)
    page.wait(lambda: page.is_done() and page.one("#error").is_displayed())
    said = f"The server at {gone.url} does not answer."
    assert page.one("#error").text == said + " The question is back in the box."
    assert (page.one("#ask").get_attribute("value"), page.turns()) == (ANSWER, [])
    page.shot("gone")
    with live(engine, bound("127.0.0.1", gone.port)):
        page.one("#send").click()
        page.wait(lambda: page.all(".assistant") and page.is_done())
        assert not page.one("#error").is_displayed()
        page.wait(lambda: page.one("#model").text == NAME)
    # The answer that was to be replaced stays.
    old = [each.text for each in page.all(".words")]
    page.all(".assistant .below button")[1].click()
    page.wait(lambda: page.is_done() and page.one("#error").is_displayed())
    assert page.one("#error").text == said + " Regenerate asks again."
    assert [each.text for each in page.all(".words")] == old


@desk
def test_a_page_that_is_left_while_the_model_writes(page: Page) -> None:
    page.script(STAND_IN)
    page.ask("a")
    page.script("say(arguments[0])", piece("so far"))
    page.wait(lambda: page.one(".assistant .words").text == "so far")
    page.browser.refresh()
    assert [each.text for each in page.all(".words")] == ["a", "so far"]
    assert page.one(".figures").text == "broken off"
    page.script(STAND_IN)
    page.ask("b")
    page.browser.refresh()
    assert [each.text for each in page.all(".words")] == ["a", "so far"]
    assert page.one("#ask").get_attribute("value") == "b"


@desk
@pytest.mark.parametrize("button", [".user button:nth-child(2)", ".assistant .below button:nth-child(2)"])
def test_what_an_answer_was_to_replace_stays_when_the_page_is_left(page: Page, button: str) -> None:
    page.seed(ASKED, written("old"), ASKED, written("older"))
    kept = page.turns()
    page.script(STAND_IN)
    page.one(button).click()
    is_edit = button.startswith(".user")
    if is_edit:
        page.ask(" now")
    assert len(page.turns()) == 2
    for _ in range(2):
        page.browser.refresh()
        assert page.turns() == kept
        assert [each.text for each in page.all(".words")] == [ANSWER, "old", ANSWER, "older"]
        assert page.one("#ask").get_attribute("value") == (ANSWER + " now" if is_edit else "")
        assert page.one("#editing").is_displayed() == is_edit


@desk
def test_a_full_store_keeps_texts_without_trees(page: Page) -> None:
    page.script(STAND_IN)
    page.script("for (const turn of arguments[0]) { turns.push(turn); show(turn); }", [ASKED, written("old")])
    page.script("turns[1].trees = [[['x'.repeat(6e6), -1, 'target', true]]]")
    page.one(".assistant .below button:nth-child(2)").click()
    page.browser.refresh()
    assert [(turn["content"], turn.get("trees")) for turn in page.turns()] == [(ANSWER, None), ("old", [])]


def test_the_progress_of_a_prompt(page: Page) -> None:
    page.script(STAND_IN)
    page.ask("a")
    page.wait(lambda: page.one(".wait").text == "Waiting for the model")
    assert page.script("return asked.return_progress") is True
    page.script("say({choices: [], prompt_progress: {total: 6142, cache: 0, processed: 2048, time_ms: 9}})")
    page.wait(lambda: page.one(".wait").text == "Reading 2,048 of 6,142 tokens")
    assert page.script("return document.querySelector('progress').position") == pytest.approx(1 / 3, abs=0.01)
    page.shot("reading")
    page.script("say(arguments[0])", piece("yes"))
    page.wait(lambda: not page.all(".wait"))
    page.shot("writing")
    page.one("#send").click()
    page.wait(page.is_done)
    assert page.turns()[1]["content"] == "yes"
    # Nothing was shown of this one: the question is there to be asked again, before what is written meanwhile.
    page.ask("b")
    page.one("#ask").send_keys("c")
    page.one("#send").click()
    page.wait(page.is_done)
    assert (page.one("#ask").get_attribute("value"), len(page.turns())) == ("b\nc", 2)


def test_the_end_of_the_text_stays_in_sight(page: Page) -> None:
    def below() -> float:
        return float(page.script("const m = at('turns'); return m.scrollHeight - m.scrollTop - m.clientHeight"))

    def is_shown(count: int) -> bool:
        return len(page.all(".assistant .words p")) == count

    lines = "a line of text that a phone has to break\n\n" * 40
    page.script(STAND_IN)
    page.ask("a")
    page.script("say(arguments[0])", piece(lines))
    page.wait(lambda: is_shown(40) and below() < 1)
    page.one("#show-tree").click()
    page.wait(lambda: below() < 1)
    page.shot("tree-beside-the-end")
    # Again if the tree's panel opened in the same moment, which takes the text to its end.
    page.wait(lambda: page.script("if (follows) at('turns').scrollTop -= 60; return !follows"))
    page.script("say(arguments[0])", piece(lines))
    page.wait(lambda: is_shown(80))
    assert below() > 100  # who went up to read is left there
    page.one("#send").click()
    page.wait(page.is_done)
    page.ask("b")
    page.wait(lambda: below() < 1)
    page.one("#send").click()
    page.wait(page.is_done)


def test_markdown(page: Page) -> None:
    page.seed(ASKED, written(*MARKDOWN.partition("|")[::2]))
    words = page.one(".assistant .words")
    html = words.get_attribute("innerHTML")
    plain = re.sub(r"</?span[^>]*>", "", html)
    for part in [
        "<h3>A title with <code>code</code></h3>",
        "<strong>bold</strong>, <em>slanted</em>, <strong><em>both</em></strong>, ",
        "snake_case_name, 2 * 3 * 4 and *no*, <s>gone <strong>and</strong> away</s>, ~5 ~~ 6~~\non a",
        '<a href="https://example.org/a_b" target="_blank" rel="noopener noreferrer" title=',
        'title="https://example.org/a_b">a link</a>',
        'title="https://example.org/x?y=1">https://example.org/x?y=1</a>.',
        '<ol start="1"><li>one<ul><li>inner <code>x</code></li></ul></li><li>two</li></ol>',
        '<pre tabindex="0"><code>def f():\n    return "**no** &lt;b&gt;"</code></pre>',
        "<blockquote><p>quoted <em>words</em>\nagain</p></blockquote>",
        '<tr><th>a</th><th class="right">b</th><th class="center">c</th></tr>',
        '<tr><td>1</td><td class="right"><strong>2</strong></td><td class="center">3</td></tr>',
        '<ul><li class="task"><input type="checkbox" disabled="" aria-label="to do">later</li>',
        '<li class="task"><input type="checkbox" disabled="" aria-label="done"><code>done</code></li>',
        "<li>[y] neither</li></ul>",
        "<hr>",
    ]:
        assert part in plain
    # Who proposed which letter is kept through markup.
    bold = '<span class="target" data-step="0">bo</span><span class="draft" data-step="1">ld</span>'
    assert f"<strong>{bold}</strong>" in html
    font = "return getComputedStyle(document.querySelector(arguments[0])).fontFamily"
    assert [each.is_selected() for each in page.all(".task input")] == [False, True]
    assert all("monospace" in page.script(font, f".words {each}") for each in ("pre code", "h3 code"))
    assert "monospace" not in page.script(font, ".words p")
    page.shot("markdown")
    assert page.overflow() <= 0


@pytest.mark.parametrize("text", HOSTILE)
@desk
def test_markup_in_an_answer_is_text(page: Page, text: str) -> None:
    page.seed(ASKED, written(*text))
    page.script("window.hit = () => { window.wasHit = true; }")
    shown = page.one(".assistant .words")
    assert not page.all(".words img, .words script, .words svg, .words b, .words i, .words a")
    for each in page.all(".words u"):
        each.click()
    assert not page.script("return window.wasHit")
    for part in re.findall(r"<[^|*`\n]*", text):
        assert part.strip() in shown.get_attribute("textContent")


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:2])
@desk
def test_no_text_takes_long_to_show(page: Page, text: str) -> None:
    page.seed(ASKED)
    page.script(
        "turns.push({role: 'assistant', content: arguments[0], pieces: [[arguments[0], 'target', 0]], trees: []});"
        "show(turns.at(-1))",
        text,
    )
    assert page.one(".assistant .words").get_attribute("textContent")


@desk
def test_copy(page: Page) -> None:
    page.seed(ASKED, written("Say:\n\n```\na\n  b\n```\n"))
    page.script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    for selector, text in {
        ".user .below button": ANSWER,
        ".assistant .below button": "Say:\n\n```\na\n  b\n```\n",
        "figcaption button": "a\n  b",
    }.items():
        page.one(selector).click()
        page.wait(lambda selector=selector: page.one(selector).text == "Copied")
        assert page.script("return copied") == text


@desk
def test_edit(page: Page) -> None:
    page.seed(ASKED, written("old"), ASKED, written("older"))
    page.all(".user button")[1].click()
    assert page.one("#editing").is_displayed()
    assert page.one("#ask").get_attribute("value") == ANSWER
    page.one("#leave").click()
    assert (page.one("#ask").get_attribute("value"), len(page.turns())) == ("", 4)
    page.all(".user button")[1].click()
    page.choose(max_tokens="2")
    page.ask(" now")
    page.wait(lambda: len(page.all(".turn")) == 2 and page.is_done())
    assert not page.one("#editing").is_displayed()
    assert page.turns()[0]["content"] == ANSWER + " now"


@desk
def test_a_half_typed_question_stays_through_an_edit(page: Page) -> None:
    def box() -> str:
        return str(page.one("#ask").get_attribute("value"))

    page.seed(ASKED, written("old"), ASKED, written("older"))
    page.one("#ask").send_keys("half")
    for i in (3, 1):  # another one, before the first is sent
        page.all(".user button")[i].click()
        assert box() == ANSWER
    page.one("#ask").send_keys("\ue00c")  # Escape
    assert box() == "half"
    page.all(".user button")[1].click()
    page.script("fetch = async () => Response.json({error: {message: 'no'}}, {status: 400})")
    page.ask(" now")
    page.wait(lambda: page.is_done() and page.one("#error").is_displayed())
    assert box() == ANSWER + " now"
    page.script(STAND_IN)
    page.ask(" again")
    page.script("say(arguments[0])", piece("yes"))
    page.wait(lambda: page.one(".assistant .words").text == "yes")
    assert [turn["content"] for turn in page.turns()] == [ANSWER + " now again", "yes"]
    assert box() == "half"
    page.one("#ask").send_keys("\ue00c")
    page.wait(page.is_done)
    assert (page.one(".figures").text, box()) == ("stopped", "half")


@desk
def test_escape_stops_an_answer(page: Page) -> None:
    page.script(STAND_IN)
    page.one("#show-tree").click()
    page.ask("a")
    page.script("say(arguments[0])", piece("so far"))
    page.wait(lambda: page.one(".assistant .words").text == "so far")
    page.one("#step").send_keys("\ue00c")
    assert not page.one("#tree").is_displayed()  # where the keyboard was
    assert not page.is_done()
    page.one("#ask").send_keys("\ue00c")
    page.wait(page.is_done)
    assert page.one(".figures").text == "stopped"


@desk
def test_regenerate(page: Page) -> None:
    page.choose(max_tokens="4", seed="5", temperature="1")
    page.seed(ASKED, written("old"), ASKED, written("older"))
    page.all(".assistant .below button")[1].click()
    page.wait(lambda: len(page.turns()) == 2 and page.is_done() and page.one(".figures").text)
    assert "old" not in page.turns()[1]["content"]
    assert page.browser.switch_to.active_element == page.one("#send")
    # The settings' seed would have given the same text each time.
    assert int(page.one(".figures").text.split("seed ")[1].split(";")[0]) != 5


@desk
def test_a_greedy_answer_has_no_seed(page: Page) -> None:
    page.choose(max_tokens="4", temperature="0")
    assert page.one("#seed").get_property("disabled")
    page.ask(ANSWER)
    page.wait(lambda: page.all(".assistant") and page.is_done())
    assert "seed" not in page.one(".figures").text
    page.choose(temperature="0.5")
    assert not page.one("#seed").get_property("disabled")


def test_the_tree_of_any_step(page: Page) -> None:
    def tree(*nodes: tuple[str, int, bool]) -> list[list[Any]]:
        return [[text, parent, "draft", right] for text, parent, right in nodes]

    forked = tree(("x", -1, True), (" b", 0, True), ("no", 0, False), ("c", 1, True))
    page.seed(ASKED, written("a", " bc", "d", trees=[tree(("q", -1, True)), forked, tree(("c", -1, True))]))
    page.one("#show-tree").click()
    beside, text = page.one("#tree").rect, page.one("main").rect
    if page.size == "desk":
        assert beside["x"] >= text["x"] + text["width"]
    else:
        assert beside["y"] >= text["y"] + text["height"]
    assert "Step 3 of 3" in page.one("#nodes").text
    page.all(".assistant .words span")[1].click()
    assert "Step 2 of 3: 2 of 3 guesses right." in page.one("#nodes").text
    assert [each.text for each in page.all(".picked")] == ["bc"]
    branches = [each.get_attribute("textContent") for each in page.all("#nodes > ul > li > ul > li")]
    assert branches == ["·bc", "no"]
    assert [each.text for each in page.all("#nodes .accepted")] == ["x", "·b", "c"]
    page.shot("tree")
    page.one("#step").send_keys("\ue012")  # the left arrow
    assert "Step 1 of 3: no guesses." in page.one("#nodes").text
    assert not page.one("#back").is_enabled()
    page.one("#next").click()
    assert "Step 2 of 3" in page.one("#nodes").text
    assert page.overflow() <= 0
    page.one("body").send_keys("\ue00c")  # Escape
    assert not page.one("#tree").is_displayed()
    assert page.browser.switch_to.active_element == page.one("#show-tree")


def test_everything_has_a_name_and_fits(page: Page, server: Server) -> None:
    page.seed(ASKED, written("a", trees=[[["q", -1, "target", True]]]))
    page.script("at('model').textContent = 'a-model-of-a-very-long-name-that-no-phone-has-room-for'")
    width = page.script("return innerWidth")
    for panel in ("settings", "tree"):
        page.one(f"#show-{panel}").click()
        page.shot(panel + "-open")
        for each in page.all("button, input, textarea"):
            if each.is_displayed():
                assert each.accessible_name
                assert each.rect["x"] >= 0
                assert each.rect["x"] + each.rect["width"] <= width
        assert page.overflow() <= 0
    assert page.one("#settings").is_displayed() == (page.size == "desk")
    page.script("toggle('settings', true)")
    params = server.ask("/props")[1]["default_generation_settings"]["params"]
    page.wait(lambda: all(f"{name.replace('_', ' ')} " in page.one("#settings .force").text for name in params))
    assert page.one("#temperature").get_attribute("placeholder") == str(params["temperature"]).removesuffix(".0")


@desk
def test_a_server_that_tells_nothing_of_its_sampling(page: Page) -> None:
    page.script("window.read = read = async () => ({})")
    assert page.script("return meet().then(() => document.querySelector('.force').textContent)") == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    """WCAG's 4.5 for text, 3 for the edges of fields."""
    text = files("pystaged.server").joinpath("page.html").read_text("utf-8")
    light, dark = (
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+)", part)) for part in re.findall(r":root \{(.*?)\}", text, re.S)
    )
    colors = light if scheme == "light" else light | dark

    def luminance(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(each * 2 for each in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted(map(luminance, (colors[one], colors[other])))
        return (high + 0.05) / (low + 0.05)

    grounds = ("page", "card", "code", "picked")
    for name in ("text", "draft", "ngram", "grammar"):
        assert min(contrast(name, ground) for ground in grounds) >= 4.5, name
    assert min(contrast(name, ground) for name in ("soft", "bad") for ground in ("page", "card", "code")) >= 4.5
    assert contrast("text", "mine") >= 4.5
    assert contrast("on-accent", "accent") >= 4.5
    assert min(contrast("field", ground) for ground in ("page", "card")) >= 3
