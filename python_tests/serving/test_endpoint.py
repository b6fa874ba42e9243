"""The endpoint through OpenAI's client: every field works as in the chain alone."""

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import polyspec_ext as ps
from polyspec_ext import tiny

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

from endpoint import QUESTION, Served, model_of  # noqa: E402

from polyspec_ext.chat import StopStrings  # noqa: E402
from polyspec_ext.serving import protocol  # noqa: E402
from polyspec_ext.serving.server import Event  # noqa: E402
from polyspec_ext.stats import LevelStats, Stats  # noqa: E402

PROMPT = tiny.prompt_of(QUESTION)
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
REQUESTS: list[dict[str, Any]] = [{"temperature": 0}, SAMPLED]
EXTRAS = {"top_k": 40, "min_p": 0.02}


def messages(text: str = QUESTION) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat_text(chunks: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_those_of_the_chain_alone(served, client, request_, stream) -> None:
    ids = served.tokenizer(PROMPT)["input_ids"]
    alone = served.alone.generate(ids, 64, **request_, **EXTRAS)
    wanted = alone.text[0]
    ending = "stop" if alone.new_tokens[0][-1] == served.tokenizer.eos_token_id else "length"
    options = {"model": "tiny", "stream": stream, "extra_body": EXTRAS, **request_}
    text = client.completions.create(prompt=PROMPT, max_tokens=64, **options)
    chat = client.chat.completions.create(messages=messages(), max_completion_tokens=64, **options)
    if stream:
        assert "".join(chunk.choices[0].text for chunk in text) == wanted
        chunks = list(chat)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chat_text(chunks) == wanted
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * len(chunks[1:])
        assert chunks[-1].choices[0].finish_reason == ending
        assert len(chunks) > 3
    else:
        assert text.choices[0].text == wanted
        assert chat.choices[0].message.content == wanted
        assert chat.choices[0].finish_reason == ending
        assert chat.usage.completion_tokens == text.usage.completion_tokens
        assert chat.usage.completion_tokens == len(alone.new_tokens[0])
        assert chat.usage.prompt_tokens == len(ids)


def test_choices_have_the_seeds_of_rows(served: Served, client: Any) -> None:
    prompts = [tiny.prompt_of(one) for one in tiny.QUESTIONS[:2]]
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=24, temperature=1.0, seed=5
    )
    seeds = ps.row_seeds(5, 4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.text == served.text_alone(
            prompts[choice.index // 2], max_new_tokens=24, temperature=1.0, seed=seeds[choice.index]
        )
    assert len({choice.text for choice in answer.choices}) == 4
    streamed = [""] * 4
    for chunk in client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=24, temperature=1.0, seed=5, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]


def test_an_echo_begins_with_the_prompt(served: Served, client: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0}
    wanted = served.text_alone(PROMPT, max_new_tokens=16)
    for stream in (False, True):
        answer = client.completions.create(prompt=PROMPT, echo=True, stream=stream, **options)
        chunks = answer if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + wanted
    ids = served.tokenizer(PROMPT)["input_ids"]
    for prompt in (ids, [ids]):  # token ids as well
        (choice,) = client.completions.create(prompt=prompt, **options).choices
        assert (choice.text, choice.finish_reason) == (wanted, "length")


def test_usage_comes_behind_a_stream_that_asks_for_it(client: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": messages(), "temperature": 0}
    whole = client.chat.completions.create(**options)
    *chunks, last = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert last.choices == []
    assert last.usage == whole.usage
    assert last.metrics == whole.metrics
    *chunks, last = client.chat.completions.create(**options, stream=True)
    assert last.metrics == whole.metrics
    assert last.choices[0].finish_reason == "stop"


def test_acceptance_is_in_the_format_of_vllm(served: Served, client: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=64, temperature=0, extra_body={"polyspec": True}
    )
    ids = served.tokenizer(PROMPT)["input_ids"]
    level = served.alone.generate(ids, 64).stats.levels[0]
    assert answer.metrics["speculative_decoding"] == {
        "mean_acceptance_length": level.mean_acceptance_length,
        "draft_acceptance_rate": level.draft_acceptance_rate,
        "acceptance_histogram": level.acceptance_histogram,
        "num_spec_steps": level.num_drafts,
        "num_accepted_draft_tokens": level.num_accepted_tokens,
        "num_draft_tokens": level.num_draft_tokens,
        "num_spec_tokens": len(level.acceptance_histogram) - 1,
    }
    assert [one["name"] for one in answer.polyspec[0]["levels"]] == served.chain.names


@pytest.mark.parametrize("stream", [False, True])
def test_levels_come_beside_the_tokens(served: Served, client: Any, stream: bool) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=messages(), temperature=0, stream=stream,
        extra_body={"polyspec": True},
    )  # fmt: skip
    found = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    parts = [choice.polyspec for choice in found if hasattr(choice, "polyspec")]
    assert all(len(one["tokens"]) == len(one["levels"]) == len(one["corrected"]) for one in parts)
    levels = [level for one in parts for level in one["levels"]]
    assert "".join(text for one in parts for text in one["tokens"]) == served.text_alone(PROMPT)
    assert set(levels) == {1, 2, 3}


def test_speculation_is_a_choice_of_the_request(served: Served, client: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=64, temperature=0,
        extra_body={"speculation": False, "polyspec": True},
    )  # fmt: skip
    assert answer.choices[0].text == served.text_alone(PROMPT, max_new_tokens=64)
    assert answer.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    assert set(answer.choices[0].polyspec["levels"]) == {1}


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_chain(served, client, stream, temperature) -> None:
    ids = served.tokenizer(PROMPT)["input_ids"]
    request = {"temperature": temperature, "seed": 3}
    alone = served.alone.generate(ids, 24, **request, logprobs=1)
    options = {"model": "tiny", **request, "max_tokens": 24, "stream": stream}
    chat = client.chat.completions.create(
        messages=messages(), logprobs=True, top_logprobs=2, **options
    )
    choices = [chunk.choices[0] for chunk in (chat if stream else [chat])]
    entries = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
    assert [one.logprob for one in entries] == pytest.approx(alone.logprobs[0], abs=1e-5)
    assert "".join(one.token for one in entries) == alone.text[0]
    assert all(bytes(one.bytes).decode() == one.token for one in entries)
    assert all(len(one.top_logprobs) == 2 for one in entries)
    assert all(one.top_logprobs[0].logprob >= one.logprob - 1e-5 for one in entries)
    for one in entries:
        values = {other.token: other.logprob for other in one.top_logprobs}
        assert values.get(one.token, one.logprob) == pytest.approx(one.logprob, abs=1e-5)
    few = client.chat.completions.create(messages=messages(), logprobs=True, **options)
    choices = [chunk.choices[0] for chunk in (few if stream else [few])]
    few = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
    assert [(one.logprob, one.top_logprobs) for one in few] == [(o.logprob, []) for o in entries]
    text = client.completions.create(prompt=PROMPT, logprobs=2, **options)
    choices = [chunk.choices[0] for chunk in (text if stream else [text])]
    values = [one for choice in choices for one in choice.logprobs.token_logprobs]
    assert values == pytest.approx(alone.logprobs[0], abs=1e-5)
    offsets = [one for choice in choices for one in choice.logprobs.text_offset]
    tokens = [one for choice in choices for one in choice.logprobs.tokens]
    for token, offset in zip(tokens, offsets, strict=True):
        assert alone.text[0][offset:].startswith(token)


def test_requests_follow_the_models_own_file() -> None:
    chain = ps.Chain([tiny.path("drafter")])
    model = protocol.Model("m", tiny.tokenizer(), [], [], chain.text_options)
    assert protocol.read({"prompt": [5]}, model, False).options[0]["temperature"] == 1.0
    file = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2}
    chain.levels[0].model.generation_config.update(**file)
    for given, temperature, top_p, penalty in (
        ({}, 0.7, 0.8, 1.2),
        ({"do_sample": False}, 0.0, 0.8, 1.2),
        ({"temperature": 1.5, "top_p": 1}, 1.5, 1.0, 1.2),
        ({"repetition_penalty": 1, "presence_penalty": 0.5}, 0.7, 0.8, 1.0),
    ):
        [options] = protocol.read({"prompt": [5], **given}, model, False).options
        assert (options["temperature"], options["top_p"]) == (temperature, top_p)
        assert options["rules"].repetition_penalty == penalty


def answered(tokenizer: Any, body: dict[str, Any], *events: Event) -> dict[str, Any]:
    model = model_of(tokenizer)
    wanted = protocol.read({"prompt": [5], **body}, model, False)
    choices = [protocol.Choice(wanted, model, number) for number in range(len(wanted.options))]
    pieces = [choice.add(event) for choice, event in zip(choices, events, strict=True)]
    return protocol.Answers(wanted, model).whole(pieces, choices)


def event(tokens: list[int], alternatives: list[Any] = [], cached: int = 0) -> Event:  # noqa: B006
    stats = Stats([LevelStats("m")], 1, num_cached_tokens=cached)
    count = len(tokens)
    logprobs = [-1.0] * count
    origins = [1] * count, [False] * count
    return Event(0, tokens, logprobs, *origins, alternatives, "length", stats=stats)


def test_of_two_ids_with_a_text_the_likelier_counts() -> None:
    tokenizer = tiny.tokenizer()
    parts = [id for id in range(len(tokenizer)) if tokenizer.decode([id]) == "\ufffd"][:3]
    word = tokenizer(" x", add_special_tokens=False)["input_ids"][-1]
    likely = [(id, -1.5 - n) for n, id in enumerate([*parts, word])]
    for chosen, part in ((word, -1.5), (parts[1], -1.0)):
        found = answered(tokenizer, {"logprobs": 4}, event([chosen], [likely]))
        (top,) = found["choices"][0]["logprobs"]["top_logprobs"]
        assert top["\ufffd"] == part
        assert list(top.values()) == sorted(top.values(), reverse=True)


def test_the_cached_tokens_of_a_prompt_count_once() -> None:
    body = {"prompt": [[5] * 8, [6] * 9], "n": 2}
    found = answered(tiny.tokenizer(), body, *(event([5], cached=count) for count in (3, 7, 8, 5)))
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 + 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(served: Served, client: Any, stream: bool) -> None:
    whole = served.text_alone(PROMPT, max_new_tokens=64)
    stop = whole[len(whole) // 2 :][:5]
    answer = client.chat.completions.create(
        model="tiny", messages=messages(), temperature=0, stop=["never", stop], stream=stream
    )
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    parts = [choice.delta if stream else choice.message for choice in choices]
    text = "".join(part.content for part in parts)
    assert text == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == stop


def test_tokens_behind_a_stop_string_are_not_counted(served: Served, client: Any) -> None:
    ids = served.tokenizer(PROMPT)["input_ids"]
    alone = served.alone.generate(ids, 64)
    for at in range(4, len(alone.text[0]) - 4, 9):
        stop = alone.text[0][at : at + 3]
        text = StopStrings(served.tokenizer, [stop])
        count = 0
        while text.stopped is None:
            text.add(alone.new_tokens[0][count])
            count += 1
        count = text.num_tokens
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, temperature=0, stop=stop, max_tokens=64
        )
        assert answer.usage.completion_tokens == count
        assert answer.choices[0].text == text.text


def test_a_stop_string_ends_the_request(served: Served, client: Any) -> None:
    whole = served.text_alone(PROMPT, max_new_tokens=64)
    before = served.server.stats.num_new_tokens
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=1500, stop=whole[5:9],
        extra_body={"ignore_eos": True, "polyspec": True},
    )  # fmt: skip
    assert answer.usage.completion_tokens == len(answer.choices[0].polyspec["tokens"]) <= 9
    assert served.server.stats.num_new_tokens - before < 100
    assert answer.metrics["speculative_decoding"]["num_draft_tokens"] > 0


def test_ends_are_ids_as_well(served: Served, client: Any) -> None:
    end = served.tokenizer(" rolls", add_special_tokens=False)["input_ids"]
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0}
    answer = client.completions.create(
        **options, max_tokens=64, extra_body={"stop_token_ids": end[-1:]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == end[-1]
    answer = client.completions.create(**options, max_tokens=100, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 100
    assert answer.choices[0].finish_reason == "length"


RULES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"19": 8.0}},
    {"bad_words": ["12"]},
    {"min_tokens": 60},
]


@pytest.mark.parametrize("rules", RULES, ids=lambda one: next(iter(one)))
def test_rules_change_the_text(served: Served, client: Any, rules: dict[str, Any]) -> None:
    usual = served.text_alone(PROMPT, max_new_tokens=64)
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=64, temperature=0, extra_body=rules
    )
    text = answer.choices[0].text
    assert text != usual
    if "bad_words" in rules:
        assert "12" in usual
        assert " 12" not in text
    if "min_tokens" in rules:
        assert answer.usage.completion_tokens >= 60


SCHEMA = {
    "type": "object",
    "properties": {"rolls": {"type": "integer"}, "left": {"enum": ["yes", "no"]}},
    "required": ["rolls", "left"],
    "additionalProperties": False,
}
LARK = 'start: "rolls: " NUMBER\nNUMBER: /[1-9][0-9]{0,2}/'


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, None),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                }
            },
            None,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-\d\d"),
        ({"structured_outputs": {"choice": ["yes.", "no (never)"]}}, r"yes\.|no \(never\)"),
        ({"structured_outputs": {"grammar": LARK}}, r"rolls: [1-9]\d{0,2}"),
        ({"response_format": {"type": "text"}}, r"[^{]+"),
    ],
)
def test_answers_have_the_form_that_was_asked_for(client, fields, pattern) -> None:
    if fields.get("response_format") != {"type": "text"}:
        pytest.importorskip("llguidance")
    answer = client.chat.completions.create(
        model="tiny", messages=messages(), temperature=0.7, seed=1, max_tokens=200,
        extra_body=fields,
    )  # fmt: skip
    text = answer.choices[0].message.content
    if pattern is not None:
        assert re.fullmatch(pattern, text, re.S), text
    elif answer.choices[0].finish_reason == "stop":
        value = json.loads(text)
        if fields.get("response_format") != {"type": "json_object"}:
            assert value.keys() == {"rolls", "left"}
    else:  # a text that is cut off
        assert text.lstrip().startswith("{")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_messages_reach_the_template_whole() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
        "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ enable_thinking }}"
    )
    model = model_of(tokenizer, 1)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = {"messages": [{"role": "user", "content": parts}]}
    calls = [{"id": "1", "type": "function", "function": {"name": "g", "arguments": "{}"}}]
    answered = {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None}
    result = {"role": "tool", "tool_call_id": "1", "content": "7"}
    begun = {"role": "assistant", "content": "c"}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    for fields, text in (
        ({}, "[user]ab>"),
        ({"tools": [], "add_generation_prompt": True}, "[user]ab>"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "f;[user]ab>"),
        ({"tools": [TOOL], "tool_choice": "none"}, "[user]ab>"),
        ({"add_generation_prompt": False}, "[user]ab"),
        ({"enable_thinking": False}, "[user]ab>False"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "[user]ab>no"),
        ({"messages": [*asked["messages"], answered, result]}, "[user]ab[assistant]g[tool]7>"),
        ({"messages": [*asked["messages"], begun], **goes_on}, "[user]ab>c"),
    ):
        wanted = protocol.read({**asked, **fields}, model, True)
        assert tokenizer.decode(wanted.prompts[0]) == text
    for fields, name in (
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"chat_template_kwargs": {"other": 1}}, "other"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"messages": [{"role": "user", "content": [{**parts[0], "x": 1}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "name": "A"}]}, "messages"),
        ({"messages": [*asked["messages"], answered], **goes_on}, "continue_final_message"),
        (goes_on, "continue_final_message"),
    ):
        with pytest.raises(protocol.Refusal) as error:
            protocol.read({**asked, **fields}, model, True)
        assert (error.value.status, error.value.param) == (400, name)


def test_the_model_is_listed(client: Any) -> None:
    (model,) = client.models.list()
    assert model.id == "tiny"
    assert model.max_model_len == 2048
    assert client.models.retrieve("tiny") == model


def test_metrics_count_what_was_answered(served: Served, client: Any) -> None:
    def values() -> dict[str, float]:
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {re.sub(r',?model_name="tiny"', "", name): float(value) for name, _, value in pairs}

    before = values()
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=64, temperature=0)
    rise = {name: value - before.get(name, 0) for name, value in values().items()}
    spec = answer.metrics["speculative_decoding"]
    new = answer.usage.completion_tokens
    level = 'polyspec_spec_decode_num_draft_tokens_total{level="1",model="target"}'
    for name, count in {
        "vllm:num_requests_running{}": 0,
        "vllm:prompt_tokens_total{}": answer.usage.prompt_tokens,
        "vllm:generation_tokens_total{}": new,
        'vllm:request_success_total{finished_reason="stop"}': 1,
        "vllm:time_to_first_token_seconds_count{}": 1,
        'vllm:e2e_request_latency_seconds_bucket{le="+Inf"}': 1,
        "vllm:request_generation_tokens_sum{}": new,
        "vllm:spec_decode_num_drafts_total{}": spec["num_spec_steps"],
        "vllm:spec_decode_num_accepted_tokens_total{}": spec["num_accepted_draft_tokens"],
        "vllm:spec_decode_num_draft_tokens_total{}": spec["num_draft_tokens"],
        level: spec["num_draft_tokens"],
    }.items():
        assert rise[name] == count, name
    assert 0 < rise["vllm:inter_token_latency_seconds_count{}"] < new


def test_metrics_are_in_the_format_of_prometheus(served: Served, client: Any) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = httpx.get(f"{served.url}/metrics").text
    families = {one.name: one for one in parser.text_string_to_metric_families(text)}
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    assert families["vllm:prompt_tokens"].type == "counter"
    assert families["vllm:num_requests_waiting"].type == "gauge"


PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_the_programs_of_the_page_run(served: Served) -> None:
    pytest.importorskip("llguidance")
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(blocks[0].replace("http://127.0.0.1:8000", served.url), names)
    assert 0 <= names["eggs"] <= 99
    assert names["accepted"] >= 1


def test_the_requests_of_the_page_are_answered(served: Served) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
    lines = block.replace("\\\n", " ").splitlines()
    assert len(lines) == 3
    for line in lines:
        program, url, *options = shlex.split(line)
        assert program == "curl"
        url = url.replace("http://127.0.0.1:8000", served.url)
        if not options:
            assert httpx.get(url).status_code == 200
            continue
        header, body = options[1::2]
        answer = httpx.post(url, content=body, headers=dict([header.split(": ")]))
        assert answer.status_code == 200
        assert "finish_reason" in answer.text


def test_the_table_of_the_page_has_every_field() -> None:
    table = PAGE.partition("### Fields")[2].partition("###")[0]
    shown = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split(", ")}
    source = Path(protocol.__file__).read_text(encoding="utf-8")
    taken = set(re.findall(r'take\(\s*"(\w+)"', source)) | set(protocol.RULES)
    taken |= {f"guided_{name}" for name in protocol.GRAMMARS} | set(protocol.OPTIONS)
    taken |= {"max_tokens", "response_format", "enable_thinking", "add_generation_prompt"}
    inner = {"include_usage", "json_object", "type", "schema", "strict", "text"}
    taken -= {"stream_options", *inner}
    assert {name.strip("`") for name in shown} == taken | {"stream_options.include_usage"}
