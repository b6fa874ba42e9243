"""The page in a headless browser, by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyspec_ext import tiny

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import browser
from endpoint import Served, wait_for

PROGRAM = browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")
READY = "document.getElementById('model')?.textContent.includes('target')"
IDLE = "state.abort === null && document.querySelectorAll('.question').length === {}"


@pytest.fixture(scope="module")
def tab(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    with browser.page(PROGRAM, tmp_path_factory.mktemp("browser")) as one:
        one.call("Page.navigate", url=f"{served.url}/")
        one.wait_for(READY)
        yield one


def ask(tab: browser.Page, text: str, questions: int) -> None:
    """Type a message, send it by Enter, and wait for its answers."""
    tab.call("Input.insertText", text=text)
    tab.press("Enter", 13, "\r")
    tab.wait_for(IDLE.format(questions))


def answers(tab: browser.Page) -> list[list[Any]]:
    """Return of each answer its tokens' texts, levels and corrections."""
    found: list[list[Any]] = tab.evaluate(
        "[...document.querySelectorAll('.answer')].map(card => [...card.querySelectorAll('.token')]"
        ".map(node => [node.textContent, node.style.getPropertyValue('--level'),"
        " node.classList.contains('corrected'), node.title,"
        " getComputedStyle(node).backgroundColor]))"
    )
    return found


def test_an_answer_has_the_colours_of_the_levels(tab: browser.Page, served: Served) -> None:
    assert tab.evaluate("document.activeElement.id") == "text"
    ask(tab, tiny.QUESTIONS[0], 1)
    (tokens,) = answers(tab)
    text = served.text_alone(tiny.prompt_of(tiny.QUESTIONS[0]), max_new_tokens=200)
    assert "".join(one[0] for one in tokens) == text
    assert {one[1] for one in tokens} == {"var(--level1)", "var(--level2)", "var(--level3)"}
    assert len({one[4] for one in tokens}) == 3
    for _, level, corrected, title, _ in tokens:
        name = served.chain.names[int(level[-2]) - 1]
        assert title == name + (", in place of a rejected token" if corrected else "")
    shares = tab.evaluate(
        "[...document.querySelectorAll('#shares .bar')].map(one => one.innerText)"
    )
    assert len(shares) == 3
    bars = tab.evaluate(
        "[...document.querySelectorAll('#accepted .bar')].map(one => one.innerText)"
    )
    assert [one.split()[0] for one in bars] == ["target", "middle"]
    assert "," in tab.evaluate("document.getElementById('line-chain').getAttribute('points')")


def test_plain_decoding_runs_beside_it(tab: browser.Page) -> None:
    for _ in range(4):  # from the text to the check box
        tab.press("Tab", 9)
    assert tab.evaluate("document.activeElement.id") == "beside"
    tab.press(" ", 32, " ")
    tab.evaluate("document.getElementById('text').focus()")
    ask(tab, tiny.QUESTIONS[1], 2)
    _, chain, plain = answers(tab)
    assert [one[0] for one in chain] == [one[0] for one in plain] != []
    assert {one[1] for one in plain} == {"var(--level1)"}
    assert "times as fast, the same text" in tab.evaluate("document.body.innerText")


def test_escape_stops_an_answer(tab: browser.Page, served: Served) -> None:
    tab.evaluate("document.getElementById('new').click()")
    tab.evaluate("document.getElementById('limit').value = 100000")
    ask(tab, tiny.QUESTIONS[2], 1)
    assert "prompt and answer of at most 2048 tokens" in tab.evaluate("document.body.innerText")
    tab.evaluate("document.getElementById('limit').value = 1500")
    tab.evaluate("document.getElementById('temperature').value = 2")  # the text has no end
    tab.call("Input.insertText", text=tiny.QUESTIONS[3])
    tab.press("Enter", 13, "\r")
    tab.wait_for("state.runs.length && state.runs[0].count > 5")
    tab.press("Escape", 27)
    tab.wait_for(IDLE.format(2))
    assert tab.evaluate("[...document.querySelectorAll('.error')].pop().textContent") == "stopped"
    wait_for(lambda: served.server.running == 0)


def begin_endless(tab: browser.Page) -> None:
    tab.evaluate("document.getElementById('limit').value = 1500")
    tab.evaluate("document.getElementById('temperature').value = 2")
    tab.call("Input.insertText", text=tiny.QUESTIONS[3])
    tab.press("Enter", 13, "\r")
    tab.wait_for("state.runs.length && state.runs[0].count > 5")


def test_who_scrolls_up_stays_there_and_a_new_conversation_forgets_the_answer(tab) -> None:
    tab.evaluate("for (let i = 0; i < 99; i += 1) add($('talk'), 'div', 'figures', 'x')")
    begin_endless(tab)
    assert tab.evaluate("atEnd()")
    tab.evaluate("document.getElementById('talk').scrollTop = 7")
    count = tab.evaluate("state.runs[0].count")
    tab.wait_for(f"state.runs[0].count > {count + 9}")
    assert tab.evaluate("document.getElementById('talk').scrollTop") == 7
    tab.evaluate("document.getElementById('new').click()")
    tab.wait_for("state.abort === null")
    assert (
        tab.evaluate("state.messages.length + document.getElementById('talk').childElementCount")
        == 0
    )


def test_an_answer_that_is_cut_says_so(tab: browser.Page) -> None:
    tab.evaluate("document.getElementById('temperature').value = 0")
    tab.evaluate("document.getElementById('limit').value = 4")
    ask(tab, tiny.QUESTIONS[0], 1)
    assert "cut off at 4 tokens" in tab.evaluate("document.querySelector('.answer').innerText")


def test_a_phone_shows_the_message_and_stop(tab: browser.Page) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    tab.call("Emulation.setDeviceMetricsOverride", **size)
    for name in ("text", "stop"):
        box = f"document.getElementById('{name}').getBoundingClientRect()"
        assert 0 < tab.evaluate(f"{box}.top") < tab.evaluate(f"{box}.bottom") <= 844
    tab.call("Emulation.clearDeviceMetricsOverride")


def test_light_and_dark(tab: browser.Page) -> None:
    found = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        tab.call("Emulation.setEmulatedMedia", features=features)
        found.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(set(found)) == 2


def test_nothing_comes_from_elsewhere_and_nothing_fails(tab: browser.Page, served: Served) -> None:
    asked = [one["params"] for one in tab.events if one["method"] == "Network.requestWillBeSent"]
    urls = {one["request"]["url"] for one in asked}
    assert len(urls) >= 2
    assert all(url.startswith((served.url, "data:")) for url in urls)
    methods = ("Runtime.exceptionThrown", "Log.entryAdded")
    failed = [str(one) for one in tab.events if one["method"] in methods]
    assert all("status of 400" in one for one in failed), failed  # of the answer without room


def test_the_page_is_a_single_file() -> None:
    text = (Path(tiny.__file__).parents[1] / "serving" / "page.html").read_text(encoding="utf-8")
    for word in ("http:", "https:", "src=", "@import", "url("):
        assert word not in text
