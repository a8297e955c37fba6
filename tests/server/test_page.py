"""The page, in a real browser: type, stream, stop, reload; at a phone's and a desk's width, in the light and the dark.

PYSTAGED_SCREENSHOTS names a folder for pictures to look at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server import Server, live, wait_until

import pystaged
from pystaged.engine import Engine

pytestmark = pytest.mark.slow
webdriver = pytest.importorskip("selenium.webdriver")
SIZES = {"phone": (390, 844), "desk": (1280, 800)}
ANSWER = "tell me <b>more</b>"


@pytest.fixture(scope="module")
def engine(house_target: Path) -> Iterator[Engine]:
    with pystaged.load(house_target, draft="none", memory=False, report=lambda _: None) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with live(engine) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("Debian's chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for each in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


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

    def shot(self, name: str) -> None:
        folder = os.environ.get("PYSTAGED_SCREENSHOTS")
        if folder:
            for scheme in ("light", "dark"):
                self.browser.execute_cdp_cmd(
                    "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
                )
                self.browser.save_screenshot(str(Path(folder) / f"{name}-{self.size}-{scheme}.png"))

    def overflow(self) -> int:
        return int(self.browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth"))


def test_type_stream_and_reload(page: Page, engine: Engine) -> None:
    page.shot("empty")
    page.choose(temperature="1", max_tokens="40", seed="1", system="Once")
    page.one("#show-tree").click()
    page.ask(ANSWER)
    page.wait(lambda: page.one(".user").text)
    page.wait(page.is_done)
    messages = [{"role": "system", "content": "Once"}, {"role": "user", "content": ANSWER}]
    expected = engine.chat(messages, max_tokens=40, temperature=1, seed=1).text
    assert expected.strip()
    shown = page.one(".assistant > div").get_attribute("textContent")
    assert shown == expected
    assert page.one(".user > div").get_attribute("textContent") == ANSWER  # no markup
    stages = {each.get_attribute("class") for each in page.all(".assistant > div > span")}
    assert "target" in stages
    assert stages <= {"target", "n-gram", "draft", "grammar"}
    assert "40 tokens" in page.one(".assistant .figures").text
    assert page.one("#tree li .target, #tree li span").text
    page.shot("answer")
    assert page.overflow() <= 0
    page.browser.refresh()
    page.wait(lambda: page.all(".assistant"))
    assert page.one(".assistant > div").get_attribute("textContent") == expected
    assert page.one("#temperature").get_attribute("value") == "1"
    page.one("#new").click()
    assert not page.all(".turn")
    assert page.one("#empty").is_displayed()


def test_stop(page: Page, engine: Engine) -> None:
    asked = [{"role": "user", "content": "go on"}]
    # Of a text that does not end before it is stopped.
    texts = (engine.chat(asked, max_tokens=900, temperature=1, seed=seed) for seed in range(1000))
    seed = next(text.seed for text in texts if text.finish_reason == "length")
    page.choose(temperature="1", max_tokens="900", seed=str(seed))
    page.ask("go on")
    page.wait(lambda: page.all(".assistant > div > span"))
    assert page.one("#send").text == "Stop"
    page.shot("writing")
    page.one("#send").click()
    page.wait(page.is_done)
    assert page.one(".assistant .figures").text == "stopped"
    page.wait(lambda: not engine._scheduler._texts)
    page.choose(max_tokens="4")
    page.ask("and on")
    page.wait(lambda: len(page.all(".assistant")) == 2 and page.is_done())
    assert "4 tokens" in page.all(".assistant .figures")[1].text


def test_an_error_is_shown(page: Page) -> None:
    page.choose(temperature="-1")
    page.ask("x")
    page.wait(page.is_done)
    assert "temperature" in page.one(".error").text
    page.shot("error")
    page.expected = "400 (Bad Request)"
