"""The page in a headless browser, by keyboard."""

import itertools
import json
import re
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
READY = (
    "document.readyState === 'complete' &&"
    " document.getElementById('model')?.textContent.includes('target')"
)
IDLE = "state.abort === null && document.querySelectorAll('.question').length === {}"


@pytest.fixture(scope="module")
def opened(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    with browser.page(PROGRAM, tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture
def tab(opened: browser.Page, served: Served) -> browser.Page:
    """The page as at its first visit."""
    opened.call("Page.navigate", url="about:blank")
    opened.call("Storage.clearDataForOrigin", origin=served.url, storageTypes="all")
    opened.call("Page.navigate", url=f"{served.url}/")
    opened.wait_for(READY)
    opened.evaluate("sessionStorage.clear(); $('new').click(); 0")
    return opened


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
    drawn = tab.evaluate("state.runs[0].tokens")
    assert "".join(one[0] for one in drawn) == text
    # Each character has the level of its token; Markdown draws some as form.
    source = iter([(char, one[1]) for one in drawn for char in one[0]])
    for shown, level, *_ in tokens:
        for char in shown:
            assert next(found for other, found in source if other == char) == int(level[-2])
    assert not {char for char, _ in source} - {"\n", "#", " "}
    assert {one[1] for one in tokens} == {"var(--level1)", "var(--level2)", "var(--level3)"}
    assert len({one[4] for one in tokens}) == 3
    assert {one[4] for one in tokens if one[1] == "var(--level1)"} == {"rgba(0, 0, 0, 0)"}
    names = tab.evaluate("document.getElementById('names').innerText")
    assert all(name in names for name in served.chain.names)
    assert not tab.evaluate("document.getElementById('line-plain').getAttribute('points')")
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
    assert tab.evaluate("document.getElementById('chart').getBoundingClientRect().height") > 50


def test_plain_decoding_runs_beside_it(tab: browser.Page) -> None:
    for _ in range(2):  # from the text to the check box
        tab.press("Tab", 9)
    assert tab.evaluate("document.activeElement.id") == "beside"
    tab.press(" ", 32, " ")
    tab.evaluate("document.getElementById('text').focus()")
    ask(tab, tiny.QUESTIONS[1], 1)
    chain, plain = answers(tab)
    assert [one[0] for one in chain] == [one[0] for one in plain] != []
    assert {one[1] for one in plain} == {"var(--level1)"}
    assert "times as fast, the same text" in tab.evaluate("document.body.innerText")


def test_escape_stops_an_answer(tab: browser.Page, served: Served) -> None:
    tab.evaluate("document.getElementById('limit').value = 100000")
    ask(tab, tiny.QUESTIONS[2], 1)
    text = tab.evaluate("document.body.innerText")
    assert "too long for the model" in text
    assert "prompt and answer of at most 2048 tokens" in text
    assert tab.evaluate("document.querySelector('.question').textContent") == tiny.QUESTIONS[2]
    begin_endless(tab)
    tab.press("Escape", 27)
    tab.wait_for(IDLE.format(2))
    assert tab.evaluate("[...document.querySelectorAll('.note')].pop().textContent") == "stopped"
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


def test_an_answer_that_is_cut_says_so_and_goes_on(tab: browser.Page, served: Served) -> None:
    tab.evaluate("document.getElementById('limit').value = 4")
    ask(tab, tiny.QUESTIONS[0], 1)
    assert "cut off at 4 tokens" in tab.evaluate("document.querySelector('.answer').innerText")
    tab.evaluate("document.getElementById('limit').value = 200")
    tab.evaluate("document.querySelector('.again').click()")
    tab.wait_for("state.abort === null && !document.querySelector('.again')")
    text = served.text_alone(tiny.prompt_of(tiny.QUESTIONS[0]), max_new_tokens=200)
    assert tab.evaluate("textOf(state.runs[0])") == text


def test_a_conversation_survives_a_reload(tab: browser.Page) -> None:
    ask(tab, tiny.QUESTIONS[0], 1)
    shown = "document.getElementById('talk').innerText"
    before = tab.evaluate(shown)
    tab.call("Page.reload")
    tab.wait_for(f"{READY} && state.shares.length")
    assert tab.evaluate(shown) == before
    assert len(tab.evaluate("state.messages")) == 2


MARKDOWN = """# A & *b*

1. one `x < 1`
   - **two**

| a | b |
|---|---|
| <img src=x onerror=alert(1)> | [c](javascript:alert(1)) [d](https://d.test) |

```py
if a < b:
    print("<b>")
```
"""
DRAW = """(() => {{
  const tokens = [...{text}].map((letter, n) => [letter, 1 + n % 3, n % 2]);
  display({{ question: "?", runs: [{{ plain: false, end: "stop", tokens }}] }});
  const text = [...document.querySelectorAll(".text")].pop();
  const all = selector => [...text.querySelectorAll(selector)];
  return {{
    tags: all("*").map(node => node.tagName),
    code: text.querySelector("pre code").textContent,
    links: all("a").map(link => link.href),
    levels: all(".token").map(one => [one.textContent, one.style.getPropertyValue("--level")]),
  }};
}})()"""
FAIL = """window.real ??= window.fetch;
window.json = (status, message) =>
  Promise.resolve(new Response(JSON.stringify({{error: {{message}}}}), {{status}}));
window.fetch = () => {answer}; 0"""
WATCH = """window.signs = [];
new MutationObserver(() => {
  const found = document.querySelector(".sign");
  if (found) signs.push(found.textContent);
}).observe($("talk"), {subtree: true, childList: true}); 0"""


def test_markdown_is_drawn_and_never_read_as_html(tab: browser.Page) -> None:
    found = tab.evaluate(DRAW.format(text=json.dumps(MARKDOWN)))
    assert {"H3", "EM", "OL", "UL", "STRONG", "TABLE", "PRE", "CODE"} <= set(found["tags"])
    assert not {"IMG", "SCRIPT", "B"} & set(found["tags"])
    assert found["code"] == 'if a < b:\n    print("<b>")'
    assert found["links"] == ["https://d.test/"]
    # A letter that the source has once has the level of that token.
    levels = {char: 1 + n % 3 for n, char in enumerate(MARKDOWN) if MARKDOWN.count(char) == 1}
    shown = {text: level for text, level in found["levels"] if text in levels}
    assert len(shown) > 5
    assert all(level == f"var(--level{levels[text]})" for text, level in shown.items())


def lightness(colour: str) -> float:
    """Return the relative luminance of "rgb(r, g, b)" (WCAG)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 390])
def test_every_width_in_light_and_dark(tab: browser.Page, width: int, scheme: str) -> None:
    ask(tab, tiny.QUESTIONS[0], 1)
    height = 844
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 400}
    tab.call("Emulation.setDeviceMetricsOverride", **size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    tab.call("Emulation.setEmulatedMedia", features=features)
    try:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        for name in ("text", "fold", "beside", "stop", "send", "new", "colours"):
            box = f"document.getElementById('{name}').getBoundingClientRect()"
            assert 0 <= tab.evaluate(f"{box}.top") < tab.evaluate(f"{box}.bottom") <= height, name
            assert 0 <= tab.evaluate(f"{box}.left") < tab.evaluate(f"{box}.right") <= width, name
        wide = tab.evaluate("document.getElementById('text').offsetWidth")
        assert wide > 0.85 * width
        folded = tab.evaluate("getComputedStyle(document.querySelector('aside')).display")
        assert (folded == "none") == (width < 900)
        assert tab.evaluate("document.getElementById('settings').offsetHeight") == 0
        assert tab.evaluate("document.getElementById('locked').hidden")
        style = "getComputedStyle(document.querySelector('{}')).{}"
        ink = lightness(tab.evaluate(style.format("#talk", "color")))
        card = lightness(tab.evaluate(style.format(".answer", "backgroundColor")))
        drafts = [
            lightness(
                tab.evaluate(style.format(f"#names .token:nth-child({n})", "backgroundColor"))
            )
            for n in (1, 2)
        ]
        for back in (card, *drafts):  # WCAG's least contrast of text
            assert (max(ink, back) + 0.05) / (min(ink, back) + 0.05) >= 4.5
        for one, other in itertools.combinations((card, *drafts), 2):
            assert (max(one, other) + 0.05) / (min(one, other) + 0.05) >= 1.15
    finally:
        tab.call("Emulation.clearDeviceMetricsOverride")
        tab.call("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("Promise.reject(new TypeError('x'))", "The server does not answer"),
        ("json(429, 'expected at most 2')", "The server is busy"),
        ("json(401, 'authorization: expected')", "wants an API key"),
        ("Promise.resolve(new Response('<html>', {status: 502}))", "The server has failed"),
    ],
)
def test_errors_are_sentences_and_the_question_can_be_asked_again(tab, answer, sentence) -> None:
    tab.evaluate(FAIL.format(answer=answer))
    ask(tab, tiny.QUESTIONS[0], 1)
    assert sentence in tab.evaluate("document.querySelector('.error').innerText")
    assert tab.evaluate("document.querySelector('.question').textContent") == tiny.QUESTIONS[0]
    locked = tab.evaluate("document.getElementById('locked').hidden")
    assert locked == ("401" not in answer)
    tab.evaluate("window.fetch = window.real; 0")
    tab.evaluate("[...document.querySelectorAll('.again')].pop().click()")
    tab.wait_for("state.abort === null && state.messages.length === 2")
    assert tab.evaluate("document.querySelectorAll('.question').length") == 1


def test_the_sign_counts_tokens_of_a_long_prompt(tab: browser.Page) -> None:
    tab.evaluate(WATCH)
    tab.call("Input.insertText", text="7 apples and 5 pears. " * 170)
    tab.press("Enter", 13, "\r")
    tab.wait_for(IDLE.format(1))
    counts = [re.findall(r"\d+", one) for one in tab.evaluate("signs") if "reading" in one]
    assert counts
    assert all(0 < int(read) < int(of) for read, of in counts)


def test_nothing_comes_from_elsewhere_and_nothing_fails(tab: browser.Page, served: Served) -> None:
    ask(tab, tiny.QUESTIONS[0], 1)
    asked = [one["params"] for one in tab.events if one["method"] == "Network.requestWillBeSent"]
    urls = {one["request"]["url"] for one in asked}
    assert len(urls) >= 2
    assert all(url.startswith((served.url, "data:", "about:")) for url in urls)
    methods = ("Runtime.exceptionThrown", "Log.entryAdded")
    failed = [str(one) for one in tab.events if one["method"] in methods]
    assert all("status of 400" in one for one in failed), failed  # of the answer without room


def test_the_page_is_a_single_file() -> None:
    text = (Path(tiny.__file__).parents[1] / "serving" / "page.html").read_text(encoding="utf-8")
    for word in ("http:", "https:", "src=", "@import", "url("):
        assert word not in text
