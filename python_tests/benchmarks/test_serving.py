"""``python -m benchmarks serving``: untrained models, and a program that answers as llama.cpp's
server does."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import output, serving
from benchmarks.__main__ import main
from benchmarks.serving import Ask, Load, Service, Trace, served

TINY = ("--max-new-tokens", "8", "--clients", "1,3", "--per-client", "2")
OTHERS = {serving.TRANSFORMERS, serving.LLAMA, serving.LLAMA_DRAFTS}

# Answers every prompt with its first ids, token by token.
STAND_IN = """#!{python}
import http.server, json, sys
if "--version" in sys.argv:
    sys.exit("version: 1 (stand-in)")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["samplers"] == ["temperature"] and not asked["cache_prompt"]
        self.send_response(200)
        self.end_headers()
        tokens = [[token] for token in asked["prompt"][: asked["n_predict"]]]
        for part in [*({{"tokens": one}} for one in tokens), {{"tokens": [], "stop": True}}]:
            self.wfile.write(b"data: " + json.dumps(part).encode() + b"\\n\\n")
    def log_message(self, *arguments):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    program = tmp_path / "llama-server"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    return program


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(("serving", *arguments))
    out = capsys.readouterr()
    return status, out.out, out.err


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = call(capsys, "--repeats", "1", "--json", *arguments)
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.usefixtures("tiny_untrained")
def test_every_method_answers_at_every_load(
    capsys: pytest.CaptureFixture[str], stand_in: Path, tmp_path: Path
) -> None:
    """Our texts are plain decoding's, with any other servers; every method has the same questions,
    limits and ends."""
    files = ["--gguf", f"{stand_in},{stand_in}", "--llama-server", str(stand_in)]
    methods = [name for name in serving.METHODS if name not in serving.OF_VLLM]
    every = ["--methods", ",".join(methods)]
    found = report(capsys, *TINY, *files, *every, "--temperatures", "0,0.8")
    rows = found["rows"]
    assert [row["error"] for row in rows] == [None] * len(rows)
    cases = {(row["method"], row["clients"], row["temperature"]) for row in rows}
    assert cases == {(m, c, t) for m in methods for c in (1, 3) for t in (0, 0.8)}
    for row in rows:
        assert row["requests"] == 2 * row["clients"]
        assert 0 < row["tokens"] <= 8 * row["requests"]
        same = [other for other in rows if other["clients"] == row["clients"]]
        assert {other["prompt_tokens"] for other in same} == {row["prompt_tokens"]}
        assert row["tokens_per_second"]["low"] > 0
        assert row["first_token"][0] <= row["first_token"][1]
        if row["method"] == serving.PLAIN:
            assert row["x_plain"]["median"] == 1.0
        if row["method"] == serving.BATCHES:
            assert row["between_tokens"] is None  # an answer arrives whole
        if row["temperature"] > 0:
            assert row["texts"] is None
        elif row["method"] not in OTHERS:
            assert row["texts"].startswith(f"{row['requests']} of {row['requests']}")
    (alone, drafts) = found["servers"]
    assert alone["version"] == "version: 1 (stand-in)"
    assert "-np 3" in alone["command"]
    assert "-md llama-server --spec-type draft-simple" in drafts["command"]
    assert str(tmp_path) not in json.dumps(found)
    text = serving.markdown(found)
    assert text.count("| 3 | Server, speculation=False |") == 2


@pytest.mark.usefixtures("tiny_untrained")
def test_other_texts_than_plain_decodings_are_an_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(self: Trace, tokens: list[int], now: float) -> None:
        self.tokens += [(token + len(self.arrivals)) % 8 for token in tokens]
        self.arrivals.append((now, len(tokens)))

    monkeypatch.setattr(Trace, "arrived", other)
    words = [*TINY, "--methods", "plain,generate", "--temperatures", "0", "--repeats", "1"]
    status, out, _ = call(capsys, *words)
    assert status == 1
    assert "DIFFER" in out


def test_a_client_asks_when_it_is_answered() -> None:
    """No more requests than clients at a time, and each that is free asks at once."""
    waiting, most = list[Ask](), list[int]()

    @contextlib.contextmanager
    def opened(load: Load) -> Iterator[Service]:
        def step() -> list[tuple[int, list[int], bool]]:
            most.append(len(waiting))
            asked = waiting.pop()
            return [(asked.number, [asked.number, 7], True)]

        def add(asked: Ask) -> int:
            waiting.append(asked)
            return asked.number

        yield Service(add, step)

    done = served(opened, [Ask(number, [1]) for number in range(6)], Load(2, 0.0, 4))
    assert most == [2, 2, 2, 2, 2, 1]
    assert sorted(trace.ask.number for trace in done) == [*range(6)]
    assert all(trace.tokens == [trace.ask.number, 7] for trace in done)


def test_a_report_names_the_commit() -> None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("no checkout")
    git = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=True)
    assert (output.commit() or "").rstrip("+") == done.stdout.strip()


def test_times_between_tokens() -> None:
    trace = Trace(Ask(0, [1]), 10.0)
    for now, count in ((10.5, 2), (10.7, 1), (11.3, 3)):
        trace.arrived([0] * count, now)
    trace.arrived([], 12.0)
    assert trace.tokens == [0] * 6
    assert list(trace.gaps()) == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert serving.percentiles(range(101)) == [50, 95]
    assert serving.percentiles([]) is None
