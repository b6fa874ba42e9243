"""Refusals of the endpoint, and rude clients, which change no other request and leave nothing."""

import contextlib
import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import polyspec_ext as ps
from polyspec_ext import cli, tiny

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from endpoint import Served, connection, head, model_of, post, wait_for  # noqa: E402
from resident import allocated  # noqa: E402

from polyspec_ext.cli import serve  # noqa: E402
from polyspec_ext.serving import protocol  # noqa: E402
from polyspec_ext.serving.api import Limits  # noqa: E402

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]}
PROMPT: dict[str, Any] = {"prompt": "x", "max_tokens": 4}
DEEP = "[" * 100_000


# ---- errors --------------------------------------------------------------------------------------

ERRORS: list[tuple[str, dict[str, Any] | bytes, int, str]] = [
    (TEXT, b"{", 400, "body: expected a JSON object in UTF-8, given something else"),
    (TEXT, b"[1]", 400, "body: expected a JSON object in UTF-8, given list"),
    (TEXT, b'{"prompt": "\xff"}', 400, "given other bytes at 12"),
    (TEXT, f'{{"prompt": {DEEP}'.encode(), 400, "nested too deeply"),
    (TEXT, b'{"prompt": "x", "temperature": NaN}', 400, "NaN is no number of JSON"),
    (TEXT, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, "body: expected a JSON object"),
    (TEXT, b'{"prompt": "a\\ud800"}', 400, "prompt: expected text, given half of a character"),
    (TEXT, {}, 400, "prompt: expected text or token ids, or several in a list, given None"),
    (TEXT, {"prompt": []}, 400, "prompt: expected at least 1 token, given none"),
    (TEXT, {"prompt": [5, 9999]}, 400, "prompt: expected token ids in [0, 2048), given 9999"),
    (TEXT, {"prompt": ["a", 3]}, 400, "prompt: expected text or token ids, or several in a list"),
    (TEXT, {**PROMPT, "model": "other"}, 404, "model: expected 'tiny', given 'other'"),
    (TEXT, {**PROMPT, "temprature": 1}, 400, "expected no such field, given 1; did you mean temp"),
    (TEXT, {**PROMPT, "temperature": -1}, 400, "temperature: expected a finite number >= 0"),
    (TEXT, {**PROMPT, "temperature": "hot"}, 400, "temperature: expected a number, given 'hot'"),
    (TEXT, {**PROMPT, "top_p": 2}, 400, "top_p: expected a number in [0, 1], given 2"),
    (TEXT, {**PROMPT, "seed": 2**64}, 400, "seed: expected an integer in ["),
    (TEXT, {**PROMPT, "n": 0}, 400, "n: expected an integer in [1, 128], given 0"),
    (TEXT, {"prompt": ["x"] * 3, "n": 50}, 400, "n: expected at most 128 choices in all, given"),
    (TEXT, {**PROMPT, "max_tokens": 0}, 400, "max_tokens: expected an integer in [1,"),
    (TEXT, {"prompt": "x", "max_tokens": 5000}, 400, "prompt and answer of at most 2048 tokens"),
    (TEXT, {"prompt": [5] * 301}, 400, "prompt: expected at most 300 tokens, given 301"),
    (TEXT, {**PROMPT, "stop": [""]}, 400, "stop: expected at most 64 strings, none empty, given"),
    (TEXT, {**PROMPT, "stop": 3}, 400, "stop: expected a string or a list of strings, given 3"),
    (TEXT, {**PROMPT, "stream": "yes"}, 400, "stream: expected True or False, given 'yes'"),
    (TEXT, {**PROMPT, "stream_options": {"x": 1}}, 400, "stream_options.x: expected no such field"),
    (TEXT, b'{"prompt": "x", "\\ud800": 1}', 400, "\\ud800: expected no such field, given 1"),
    (
        TEXT,
        {**PROMPT, "temperature": 0.5, "do_sample": False},
        400,
        "do_sample: expected True besi",
    ),
    (TEXT, {**PROMPT, "logprobs": 21}, 400, "logprobs: expected an integer in [0, 20], given 21"),
    (TEXT, {**PROMPT, "echo": True, "logprobs": 1}, 400, "echo: expected no logprobs beside it"),
    (TEXT, {**PROMPT, "stop_token_ids": [-1]}, 400, "stop_token_ids: expected token ids in"),
    (TEXT, {**PROMPT, "suffix": "y"}, 400, 'suffix: expected "" or no such field'),
    (TEXT, {**PROMPT, "presence_penalty": 3}, 400, "presence_penalty: expected a number in ["),
    (TEXT, {**PROMPT, "logit_bias": {"x": 1}}, 400, "logit_bias: expected token ids as names"),
    (TEXT, {**PROMPT, "logit_bias": {"4000": 1}}, 400, "logit_bias: expected token ids in"),
    (TEXT, {**PROMPT, "speculation": "x"}, 400, "speculation: expected a bool or"),
    (TEXT, {**PROMPT, "response_format": {"type": "x"}}, 400, "response_format: expected the type"),
    *[
        (TEXT, {**PROMPT, "response_format": form}, 400, f"response_format{message}")
        for form, message in (
            ({}, ": expected the type text, json_object or json_schema, given None"),
            ({"type": "text", "schema": {}}, ".schema: expected no such field"),
            ({"type": "json_schema"}, ".json_schema: expected an object with the field schema"),
            ({"type": "json_schema", "json_schema": {"type": "object"}}, ".json_schema.type: exp"),
        )
    ],
    (TEXT, {**PROMPT, "structured_outputs": {}}, 400, "structured_outputs: expected one of json"),
    (
        TEXT,
        {**PROMPT, "structured_outputs": {"x": 1}},
        400,
        "structured_outputs.x: expected no suc",
    ),
    (TEXT, {**PROMPT, "guided_choice": []}, 400, "guided_choice: expected at least 1 string, giv"),
    (TEXT, {**PROMPT, "guided_json": "[1]"}, 400, "guided_json: expected a JSON object in UTF-8"),
    (TEXT, {**PROMPT, "guided_regex": "a", "guided_json": {}}, 400, "expected one grammar, given"),
    (TEXT, {**PROMPT, "guided_regex": "("}, 422, "guided_regex: pattern: expected a valid grammar"),
    (TEXT, {**PROMPT, "guided_json": 3}, 400, "guided_json: expected an object, given 3"),
    (TEXT, {**PROMPT, "guided_json": {"type": 3}}, 422, "guided_json: schema: expected a valid"),
    (TEXT, {**PROMPT, "guided_regex": "(" * 9000}, 422, "(((..."),
    *[
        (
            TEXT,
            {**PROMPT, "max_tokens": 16, "temperature": 0, form: ["yes", "no"], **more},
            422,
            f"{', '.join(more)} and {form}: no token can follow the text: change ",
        )
        for form, more in (
            ("guided_choice", {"min_tokens": 12}),
            ("guided_choice", {"bad_words": ["yes", "no", "y", "n", "ye"]}),
        )
    ],
    (CHAT, {}, 400, "messages: expected a list of at least one, given None"),
    (CHAT, {"messages": ["x"]}, 400, "messages[0]: expected an object, given 'x'"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0]: expected a string, given None"),
    (CHAT, {"messages": [{"role": "system", "content": "x"}]}, 422, "messages: expected a conv"),
    (CHAT, {**ASKED, "max_tokens": 2, "max_completion_tokens": 3}, 400, "max_completion_tokens: "),
    (CHAT, {**ASKED, "chat_template_kwargs": {"\ud800": 1}}, 400, "\\ud800: no variable"),
    (TEXT, {**PROMPT, "guided_json": {"const": "\ud800"}}, 422, "guided_json: "),
    (CHAT, {**ASKED, "top_logprobs": 2}, 400, "top_logprobs: expected logprobs beside it"),
    (CHAT, {**ASKED, "tools": [{}]}, 400, "tools: no variable that the chat template"),
]


@pytest.fixture(scope="module")
def narrow(chains: tuple[ps.Chain, ps.Chain]) -> Iterator[Served]:
    """An endpoint with limits, over the chain for comparisons: no test below runs requests."""
    limits = Limits(body=300_000, prompt=300)
    with Served(chains[1], chains[1], limits=limits) as one:
        yield one


def test_errors_name_the_field_what_was_expected_and_what_came(narrow: Served) -> None:
    wrong = []
    with httpx.Client(base_url=narrow.url) as client:
        for path, body, status, message in ERRORS:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = client.post(path, content=data, headers={"Content-Type": "application/json"})
            error = answer.json().get("error", {"message": "answered", "param": None, "type": ""})
            field = re.match(r"[\w\\]+", error["message"])
            named = error["param"] is None or (field is not None and error["param"] == field[0])
            usual = error["type"] == "invalid_request_error"
            if answer.status_code != status or message not in error["message"] or not named & usual:
                wrong.append((body, answer.status_code, error))
    assert not wrong
    assert narrow.counts()["active"] == narrow.server.running == narrow.server.waiting == 0


# For fields that the endpoint does not read, values of their types.
VALUES = (True, False, 0, 1, 2, "", "x", "auto", [], ["text"], {}, {"x": 1})


def test_a_field_that_is_not_read_is_neutral_or_refused(served: Served) -> None:
    model = served.endpoint.model
    neutral = {
        **{"best_of": 1, "modalities": ["text"], "typical_p": 1, "suffix": "", "store": False},
        **{"tools": [], "tool_choice": "auto", "skip_special_tokens": True, "cache_prompt": True},
    }
    for name in (*neutral, "do_nothing", "use_speculation", "add_special_tokens", "web_search"):
        for value in VALUES:
            same = name in neutral and json.dumps(value) == json.dumps(neutral[name])
            if same or (name, value) == ("tool_choice", "none"):
                protocol.read({**PROMPT, name: value}, model, False)
                continue
            said = f"{name}: expected .*no such field, given"
            with pytest.raises(protocol.Refusal, match=said) as error:
                protocol.read({**PROMPT, name: value}, model, False)
            assert (error.value.status, error.value.param) == (400, name)


def test_fields_that_change_nothing_are_taken(served: Served) -> None:
    ignored = {"user": "u", "store": False, "suffix": None, "logit_bias": {}, "top_k": -1}
    for greedy in ({"temperature": 0}, {"do_sample": False}):
        answer = httpx.post(f"{served.url}{TEXT}", json={**PROMPT, **ignored, **greedy})
        assert answer.json()["choices"][0]["text"] == served.text_alone("x", max_new_tokens=4)


def test_other_paths_methods_types_and_hosts_are_refused(narrow: Served) -> None:
    assert httpx.get(f"{narrow.url}/v1/other").status_code == 404
    assert httpx.get(narrow.url + TEXT).status_code == 405
    assert "expected a POST request" in httpx.get(narrow.url + TEXT).json()["error"]["message"]
    for kind in (None, "text/plain", "application/x-www-form-urlencoded"):
        sent = {} if kind is None else {"Content-Type": kind}
        form = httpx.post(narrow.url + TEXT, content=json.dumps(PROMPT), headers=sent)
        assert form.status_code == 415
    other = httpx.post(narrow.url + TEXT, json=PROMPT, headers={"Host": "elsewhere.example"})
    assert other.status_code == 400
    assert httpx.get(f"{narrow.url}/health").status_code == 200


def test_a_model_without_a_template_only_continues_text(chains: tuple[ps.Chain, ps.Chain]) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    with Served(chains[1], chains[1], tokenizer=tokenizer) as one:
        (model,) = httpx.get(f"{one.url}/v1/models").json()["data"]
        assert model["chat"] is False
        answer = httpx.post(one.url + CHAT, json=ASKED)
        assert answer.status_code == 400
        assert "expected a model with a chat template" in answer.json()["error"]["message"]
        assert httpx.post(one.url + TEXT, json=PROMPT).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_10_mb_is_refused_before_it_is_read(narrow: Served, chunked: bool) -> None:
    data = b"x" * 10_000_000
    parts = (data[at : at + 65536] for at in range(0, len(data), 65536))
    with contextlib.suppress(httpx.WriteError):  # the server has closed the connection
        answer = httpx.post(
            narrow.url + TEXT,
            content=parts if chunked else data,
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["message"].startswith("body: expected at most 300000 bytes")
    wait_for(lambda: narrow.counts()["active"] == 0)


def test_a_chunked_body_is_refused_before_its_end(narrow: Served) -> None:
    lines = (f"POST {TEXT} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json",
             "Transfer-Encoding: chunked", "", "")  # fmt: skip
    with connection(narrow.port) as client:
        client.sendall("\r\n".join(lines).encode() + b"61a80\r\n" + b"x" * 400_000 + b"\r\n")
        assert b" 413 " in client.recv(100)


def test_a_key_is_asked_for(chains: tuple[ps.Chain, ps.Chain]) -> None:
    with Served(chains[1], chains[1], api_key="s3cret") as one:
        others = (None, "Bearer other", "s3cret", "Basic s3cret", "Bearer", "Bearer s3cret x")
        for shown in (*others, "bearer  s3cret", "Bearer s3cret"):
            headers = {} if shown is None else {"Authorization": shown}
            for path in ("/v1/models", "/metrics"):
                answer = httpx.get(one.url + path, headers=headers)
                right = shown not in others
                assert answer.status_code == (200 if right else 401), (shown, path)
            answer = httpx.post(one.url + TEXT, json=PROMPT, headers=headers)
            assert answer.status_code == (200 if right else 401)
        assert answer.status_code == 200
        assert httpx.get(f"{one.url}/health").status_code == 200
        page = httpx.get(one.url)
        assert "s3cret" not in page.text
        assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
    with pytest.raises(ValueError, match="api_key: expected at least 1 character"):
        Served(chains[1], chains[1], api_key="")


def test_hosts_are_names_and_addresses(chains: tuple[ps.Chain, ps.Chain]) -> None:
    hosts = ["::1", "127.0.0.1", "Localhost"]
    right = ["[::1]", "[::1]:8000", "127.0.0.1", "127.0.0.1:1", "localhost:8000", "LOCALHOST"]
    wrong = ["", "::1", "[::2]:8000", "[::1", "127.0.0.1.example", "x:127.0.0.1", "localhost.x:1"]
    with Served(chains[1], chains[1], hosts=hosts) as one:
        for host in right + wrong:
            answer = httpx.get(f"{one.url}/health", headers={"Host": host})
            assert answer.status_code == (200 if host in right else 400), host
    assert answer.json()["error"]["message"].startswith("host: expected 127.0.0.1 or ::1 or loc")


class Slow:
    """A tokenizer that takes a second for each 1,000 characters, by its count."""

    def __init__(self) -> None:
        self.inner, self.seconds = tiny.tokenizer(), 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __call__(self, text: str, **options: Any) -> Any:
        self.seconds += len(text) / 1000
        return self.inner(text, **options)


@pytest.mark.parametrize(
    ("chat", "body", "param"),
    [
        (False, {"prompt": "a" * 100_000}, "prompt"),
        (False, {"prompt": ["a" * 900] * 200}, "prompt"),
        (False, {"prompt": ["x", "a" * 100_000]}, "prompt"),
        (False, {"prompt": [5] * 100_000}, "prompt"),
        (False, {"prompt": "x", "bad_words": ["a" * 100_000]}, "bad_words"),
        (True, {"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ],
)
def test_what_is_too_long_is_not_tokenized(chat, body, param) -> None:
    tokenizer = Slow()
    model = model_of(tokenizer, 1, context=100)
    with pytest.raises(protocol.Refusal, match="expected at most") as error:
        protocol.read(body, model, chat)
    assert (error.value.status, error.value.param) == (400, param)
    assert tokenizer.seconds < 1
    # The longest tokens fit.
    word = max(tokenizer.get_vocab(), key=len)
    text = tokenizer.convert_tokens_to_string([word] * 90)
    assert len(protocol.read({"prompt": text}, model, False).prompts[0]) < 100


def test_a_request_that_stops_within_its_head_is_closed(chains) -> None:
    http = serve.protocol(0.4)
    with Served(chains[1], chains[1], http=http) as one:
        for before in (b"", post(TEXT, PROMPT)):
            with connection(one.port) as client:
                client.sendall(before)
                answer = client.recv(65536) if before else b"HTTP/1.1 200"
                assert answer.startswith(b"HTTP/1.1 200")
                client.sendall(b"POST /v1/completions HT")
                began = time.monotonic()
                while client.recv(65536):
                    pass
                assert time.monotonic() - began < 3
        long = {**LONG, "max_tokens": 300}  # takes longer
        answer = httpx.post(one.url + TEXT, json=long, timeout=60)
        assert answer.status_code == 200


# ---- queue and time ------------------------------------------------------------------------------

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def test_a_full_queue_and_time_that_is_over(chains: tuple[ps.Chain, ps.Chain]) -> None:
    limits = Limits(seconds=1.5)
    with Served(chains[1], chains[1], slots=1, max_waiting=1, limits=limits) as one:
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(httpx.post, one.url + TEXT, json=LONG, timeout=30)]
            wait_for(lambda: one.server.running == 1)
            answers.append(pool.submit(httpx.post, one.url + TEXT, json=LONG, timeout=30))
            wait_for(lambda: one.server.waiting == 1)
            full = httpx.post(one.url + TEXT, json=PROMPT)
            assert full.status_code == 429
            assert int(full.headers["Retry-After"]) >= 1
            assert full.json()["error"]["type"] == "rate_limit_error"
            several = httpx.post(one.url + TEXT, json={**PROMPT, "n": 2})
            assert several.status_code == 429
            never = httpx.post(one.url + TEXT, json={**PROMPT, "n": 3})
            assert never.status_code == 400
            stream = httpx.post(one.url + TEXT, json={**PROMPT, "stream": True})
            assert stream.status_code == 429
            found = [answer.result() for answer in answers]
        assert [answer.status_code for answer in found] == [504, 504]
        assert "within 1.5 seconds" in found[0].json()["error"]["message"]
        wait_for(lambda: one.server.running == one.server.waiting == 0)
        short = httpx.post(one.url + TEXT, json=PROMPT)
        assert short.status_code == 200


class Unwilling:
    """A drafter that fails for some texts, for some of them late."""

    def fork(self) -> Any:
        return Unwilling()

    def propose(self, context: ps.Context, k: int) -> ps.Proposal:
        first, length = context.tokens[0], len(context.tokens)
        if first == 6:
            raise ValueError("of this text")
        if first == 7 and length > 20:
            raise LookupError("of the server")
        return ps.Proposal([5] * k)


def test_a_request_that_fails_ends_alone() -> None:
    chain = ps.Chain([tiny.path("target"), Unwilling()], [3], pack=True)
    with Served(chain, chain) as one, ThreadPoolExecutor(3) as pool:

        def ask(first: int, stream: bool = False) -> Any:
            body = {"prompt": [first, 9], "max_tokens": 60, "ignore_eos": True, "stream": stream}
            return httpx.post(one.url + TEXT, json={**body, "temperature": 0}, timeout=30)

        alone = ask(5).json()["choices"]
        together = [pool.submit(ask, first) for first in (5, 6, 7)]
        sound, wrong, late = [answer.result() for answer in together]
        assert sound.json()["choices"] == alone
        assert (wrong.status_code, late.status_code) == (422, 500)
        assert "the request has failed: of this text" in wrong.json()["error"]["message"]
        *chunks, error, done, _ = ask(7, stream=True).text.split("\n\n")
        assert len(chunks) > 2
        assert "of the server" in json.loads(error[6:])["error"]["message"]
        assert done == "data: [DONE]"
        assert ask(5).json()["choices"] == alone
        assert httpx.get(f"{one.url}/health").status_code == 200


# ---- rude clients --------------------------------------------------------------------------------


def leave(one: socket.socket) -> None:
    """Close a connection with a reset."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()


def half_head(port: int) -> None:
    with connection(port) as one:
        one.sendall(head(CHAT, 100)[:40])


def half_body(port: int) -> None:
    with connection(port) as one:
        one.sendall(head(CHAT, 1000) + b'{"messages": ')
        time.sleep(0.05)


def no_http(port: int) -> None:
    with connection(port) as one:
        one.sendall(b"\x16\x03\x01\x00\xff" + bytes(range(256)))
        one.recv(1000)


def large_body(port: int) -> None:
    with connection(port) as one, contextlib.suppress(OSError):
        one.sendall(head(CHAT, 10_000_000))
        one.sendall(b"x" * 10_000_000)


def wrong_bytes(port: int) -> None:
    with connection(port) as one:
        one.sendall(post(CHAT, b'{"messages": "\xff\xfe"}') + post(TEXT, DEEP.encode()))
        one.recv(4000)


def left_at(received: int, body: dict[str, Any]) -> Callable[[int], None]:
    def run(port: int) -> None:
        with connection(port) as one:
            one.sendall(post(TEXT, body))
            count = 0
            while count < received:
                count += len(one.recv(min(512, received - count)))
            leave(one)

    return run


def slow_reader(port: int) -> None:
    with connection(port) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        one.sendall(post(TEXT, {**LONG, "stream": True, "logprobs": 5, "max_tokens": 400}))
        for _ in range(10):
            one.recv(16)
            time.sleep(0.02)
        leave(one)


def pipelined(port: int) -> None:
    with connection(port) as one:
        one.sendall(post(TEXT, PROMPT) * 5)
        one.recv(100)
        leave(one)


STREAM = {**LONG, "stream": True}
RUDE: dict[str, Callable[[int], None]] = {
    "half a head": half_head,
    "half a body": half_body,
    "no HTTP": no_http,
    "a large body": large_body,
    "wrong bytes": wrong_bytes,
    "a slow reader": slow_reader,
    "pipelined requests": pipelined,
    "left at once": left_at(0, LONG),
    "left a stream at once": left_at(0, STREAM),
    "left at the head": left_at(20, STREAM),
    "left in the stream": left_at(3000, STREAM),
    "left with several choices": left_at(1000, {**STREAM, "n": 3}),
}


def politely(served: Served, number: int) -> str:
    """Return the text of a request."""
    options = {"temperature": 0.8 * (number % 2), "seed": number}
    prompt = tiny.prompt_of(tiny.QUESTIONS[number % 4])
    body = {"prompt": prompt, "max_tokens": 40, **options}
    answer = httpx.post(served.url + TEXT, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def texts(served: Served) -> list[str]:
    return [
        served.text_alone(
            tiny.prompt_of(tiny.QUESTIONS[number % 4]),
            max_new_tokens=40, temperature=0.8 * (number % 2), seed=number,
        )
        for number in range(8)
    ]  # fmt: skip


def require_as_before(served: Served, before: dict[str, int]) -> None:
    """Wait until requests and connections have returned all resources."""

    def left() -> dict[str, int]:
        counts = served.counts()
        return {name: counts[name] for name, count in before.items() if counts[name] > count}

    with contextlib.suppress(AssertionError):
        wait_for(lambda: not left())
    assert not left(), (before, threading.enumerate())


def aborts(served: Served) -> int:
    text = httpx.get(f"{served.url}/metrics").text
    (count,) = re.findall(r'request_success_total{finished_reason="abort",.*} (\d+)', text)
    return int(count)


def test_rude_clients_change_no_text_and_leave_nothing(served: Served, texts: list[str]) -> None:
    politely(served, 0)  # the executor has its thread
    before = {**served.counts(), "tasks": 0, "connections": 0}
    wait_for(lambda: served.counts()["connections"] == 0)
    before["tasks"] = served.counts()["tasks"]
    aborted = aborts(served)
    with ThreadPoolExecutor(4) as pool:
        names = sorted(RUDE)
        for first in range(0, len(names), 4):
            group = names[first : first + 4]
            asked = [pool.submit(politely, served, number) for number in range(4)]
            crowd = [threading.Thread(target=RUDE[name], args=(served.port,)) for name in group * 2]
            for thread in crowd:
                thread.start()
            for number, answer in enumerate(asked):
                assert answer.result() == texts[number], group
            for thread in crowd:
                thread.join()
    require_as_before(served, before)
    assert served.server.running == served.server.waiting == 0
    # At least the requests of clients that have read something of their streams.
    assert aborts(served) - aborted >= 2 + 2 + 2 * 3


def test_requests_leave_nothing(served: Served) -> None:
    """Count allocations, so that a few hundred requests show one object or 6 kB of each."""
    count = 800

    def ask(number: int) -> None:
        client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        kind = {"Content-Type": "application/json"}
        with contextlib.closing(client):
            for i in range(number):
                body = {"prompt": [5 + i % 9], "max_tokens": 1, "stream": i % 2 == 0}
                client.request("POST", TEXT, json.dumps(body), kind)
                answer = client.getresponse()
                answer.read()
                assert answer.status == 200

    def crowd(pool: ThreadPoolExecutor, number: int) -> tuple[dict[str, int], tuple[int, int]]:
        for done in [pool.submit(ask, number // 4) for _ in range(4)]:
            done.result()
        wait_for(lambda: served.counts()["connections"] == 0)
        return served.counts(), allocated()

    with ThreadPoolExecutor(4) as pool:
        before, (objects, size) = crowd(pool, count // 4)
        _, (objects_after, size_after) = crowd(pool, count)
        require_as_before(served, before)
    assert objects_after - objects < count
    assert size_after - size < count * 6_000


# ---- the process ---------------------------------------------------------------------------------


@contextlib.contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command, and yield it with its address."""
    command = [sys.executable, "-m", "polyspec_ext", "serve", "--port", "0", "--pack", "on"]
    command += ["--threads", "1", *options]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = running.stderr.readline()
        assert " at http://127.0.0.1:" in line, line + running.stderr.read()
        yield running, line.split()[-1]
    finally:
        running.kill()
        running.communicate()


def test_a_signal_finishes_what_runs_and_takes_no_more() -> None:
    with process(str(tiny.path("target")), "--draft", "suffix") as (running, url):
        wait_for(lambda: answers(url), 60)
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert model["id"] == "target"  # without its folder
        body = {
            **LONG,
            "stream": True,
            "max_tokens": 400,
            "stream_options": {"include_usage": True},
        }
        with httpx.stream("POST", url + TEXT, json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            running.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
            refused = httpx.post(url + TEXT, json=PROMPT)
            assert refused.status_code == 503
            assert "Retry-After" in refused.headers
            whole = [first, *filter(None, lines)]
        assert whole[-1] == "data: [DONE]"
        assert json.loads(whole[-2][6:])["usage"]["completion_tokens"] == 400
        assert running.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return bool(httpx.get(f"{url}/health").status_code == 200)
    return False


@pytest.mark.slow
def test_a_second_signal_ends_at_once() -> None:
    with process("--name", "shipped") as (running, url):
        wait_for(lambda: answers(url), 60)
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert model["id"] == "shipped"
        body = {**LONG, "stream": True, "n": 4}
        with httpx.stream("POST", url + TEXT, json=body, timeout=60) as stream:
            lines = stream.iter_lines()  # which closes the connection where it is dropped
            next(lines)
            running.send_signal(signal.SIGINT)
            wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
            running.send_signal(signal.SIGINT)
            assert running.wait(10) == 0


def test_the_command_says_what_is_wrong(capsys, monkeypatch) -> None:
    assert cli.main(["serve", "a", "--target", "b"]) == 2
    assert capsys.readouterr().err == "error: --target: expected one target, given a and b\n"
    assert cli.main(["serve", "--api-key", ""]) == 2
    assert "error: --api-key: expected at least 1 character" in capsys.readouterr().err
    monkeypatch.setenv("POLYSPEC_API_KEY", " ")
    assert cli.main(["serve"]) == 2
    assert "error: POLYSPEC_API_KEY: expected at least 1 character" in capsys.readouterr().err
    monkeypatch.delenv("POLYSPEC_API_KEY")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "error: --port: expected a free one" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.startswith("starlette")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "polyspec_ext.serving.api", raising=False)
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert cli.main(["serve"]) == 2
    assert "pip install polyspec_ext[server]" in capsys.readouterr().err
