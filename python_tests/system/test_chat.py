"""Conversations: chat templates, and the two commands that use them, on untrained models."""

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import polyspec_ext as ps
from polyspec_ext import chat, cli, tiny
from polyspec_ext.cli import plan as command

pytestmark = pytest.mark.usefixtures("tiny_untrained")
# Says who speaks, and takes a system prompt.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SHORT = ("--max-new-tokens", "5")


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory, untrained: Path) -> Path:
    return with_template(untrained, tmp_path_factory.mktemp("instruct"), TEMPLATE)


def with_template(untrained: Path, place: Path, template: str | None) -> Path:
    AutoModelForCausalLM.from_pretrained(untrained / "target").save_pretrained(place)
    tokenizer = AutoTokenizer.from_pretrained(untrained / "target")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(place)
    return place


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    out = capsys.readouterr()
    return status, out.out, out.err


def talk(capsys, monkeypatch, lines, *words) -> tuple[int, str, list[str]]:
    seen: list[str] = []
    begin = ps.Chain.begin

    def noted(self: ps.Chain, requests: Any, **options: Any) -> Any:
        seen.append(tiny.tokenizer().decode(requests[0].tokens))
        return begin(self, requests, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ps.Chain, "begin", noted)
        patch.setattr("sys.stdin", io.StringIO(lines))
        status, out, err = call(capsys, "chat", *words)
    return status, out + err, seen


def test_the_shipped_template_is_the_form_that_the_models_know() -> None:
    tokenizer = tiny.tokenizer()
    first = tiny.prompt_of("How many? ")
    messages = [{"role": "user", "content": "How many? "}]
    prompt = chat.chat_prompt(tokenizer, messages)
    assert prompt.input_ids == tokenizer(first).input_ids
    assert prompt.text == f"{tokenizer.bos_token}{first}"
    messages += [{"role": "assistant", "content": " 7 "}, {"role": "user", "content": "So?"}]
    # As in training, where documents follow each other.
    second = tokenizer(tiny.prompt_of("So?")).input_ids
    expected = [*tokenizer(f"{first} 7").input_ids, tokenizer.eos_token_id, *second]
    assert chat.chat_prompt(tokenizer, messages).input_ids == expected


@pytest.mark.parametrize("level", tiny.LEVELS)
def test_the_shipped_models_have_the_template_of_training(monkeypatch, level) -> None:
    monkeypatch.delenv("POLYSPEC_TINY")
    tokenizer = AutoTokenizer.from_pretrained(tiny.path(level))
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ("hello", TypeError, "messages: expected mappings .* in a list, given 'hello'"),
        ({"role": "user"}, TypeError, "messages: expected mappings .* in a list, given dict"),
        ([], ValueError, "messages: expected mappings .* given none"),
        ([{"role": "user"}], TypeError, "messages: expected mappings"),
        ([{"role": "user", "content": 3}], TypeError, "messages: expected mappings"),
        ([{"role": "system", "content": "x"}], ValueError, "refuses: the shipped models take"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, error, text) -> None:
    with pytest.raises(error, match=text):
        chat.chat_prompt(tiny.tokenizer(), messages)


# Reads every content, as Qwen's do, and writes contents of three roles, without their reasoning.
ROLES = (
    "{% for m in messages %}{% set text = (m.content or '').split('</think>')[-1] | trim %}"
    "{% if m.role in ['system', 'user', 'assistant'] %}[{{ m.role }}]{{ text }}"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.last %}{{ m.reasoning_content }}"
    "{% endif %}{% for c in m.tool_calls or [] %}<{{ c.function.name }} ARGUMENTS>{% endfor %}"
    "{% endif %}{% endfor %}[assistant]{% if enable_thinking is false %}(no){% endif %}"
)
ARGUMENTS = {
    "text": "{{ c.function.arguments }}",
    "JSON": "{{ c.function.arguments | tojson }}",
    "items": "{% for k, v in c.function.arguments | items %}{{ k }}: {{ v }}{% endfor %}",
}
QUESTION = {"role": "user", "content": "Hi"}
CALL = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Ulm"}'}}
]}  # fmt: skip


def with_roles(arguments: str = "JSON") -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = ROLES.replace("ARGUMENTS", ARGUMENTS[arguments])
    return tokenizer


@pytest.mark.parametrize("role", ["function", "User", "", "tool"])
@pytest.mark.parametrize("content", ["Be brief.", "i"])  # the second is a part of other text
def test_a_message_that_the_template_leaves_out_is_refused(role, content) -> None:
    messages = [QUESTION, {"role": role, "content": content}]
    for read in (chat.chat_text, lambda *args: chat.fitted_prompt(*args, None, 9, 99)):
        with pytest.raises(ValueError, match=rf"messages\[1\]: .* of the role '{role}'"):
            read(with_roles(), messages)
    silent = with_roles()
    silent.chat_template = ROLES.replace("'system', ", "")
    with pytest.raises(ValueError, match=r"^system: the chat template leaves out the content"):
        chat.chat_text(silent, [QUESTION], "S")
    # Messages with edited or empty contents are not left out.
    kept = [{"role": "assistant", "content": "<think>x</think> so "}, {"role": role, "content": ""}]
    assert chat.chat_text(with_roles(), [QUESTION, *kept]) == "[user]Hi[assistant]so[assistant]"


def test_a_developer_is_the_system_of_a_template_without_one() -> None:
    messages = [{"role": "developer", "content": "S"}, QUESTION]
    assert chat.chat_text(with_roles(), messages) == "[system]S[user]Hi[assistant]"
    tokenizer = with_roles()
    tokenizer.chat_template = ROLES.replace("'system'", "'developer'")
    assert chat.chat_text(tokenizer, messages) == "[developer]S[user]Hi[assistant]"
    assert messages[0]["role"] == "developer"


def test_fields_of_messages_are_read_or_refused() -> None:
    tokenizer = with_roles()
    reasoning = {"role": "assistant", "content": "so", "reasoning_content": "It is."}
    assert (
        chat.chat_text(tokenizer, [QUESTION, reasoning]) == "[user]Hi[assistant]soIt is.[assistant]"
    )
    # The template leaves it out of earlier turns.
    text = chat.chat_text(tokenizer, [QUESTION, reasoning, QUESTION])
    assert text == "[user]Hi[assistant]so[user]Hi[assistant]"
    empty = {"tool_calls": [], "refusal": None, "name": ""}
    assert chat.chat_text(tokenizer, [{**QUESTION, **empty}]) == "[user]Hi[assistant]"
    asks = tiny.tokenizer()
    asks.chat_template = "{{ messages[0].content if messages[0].tool_calls is undefined }}"
    assert chat.chat_text(asks, [{**QUESTION, **empty}]) == "Hi"
    linked = {"role": "user", "content": "7", "tool_call_id": "1"}
    assert chat.chat_text(tokenizer, [QUESTION, linked]) == "[user]Hi[user]7[assistant]"
    for message in (
        {**QUESTION, "name": "Ann"}, {**QUESTION, "contents": "x"}, {**QUESTION, "prefix": False},
        {**QUESTION, "thinking": "x"},
    ):  # fmt: skip
        name = list(message)[-1]
        with pytest.raises(TypeError, match=rf"messages\[1\].{name}: no field .* remove it"):
            chat.chat_text(tokenizer, [QUESTION, message])


@pytest.mark.parametrize(
    ("arguments", "written"),
    [("text", '{"city": "Ulm"}'), ("JSON", '{"city": "Ulm"}'), ("items", "city: Ulm")],
)
def test_arguments_of_calls_have_the_form_that_the_template_reads(arguments, written) -> None:
    expected = f"[user]Hi[assistant]<f {written}>[user]Hi[assistant]"
    tokenizer = with_roles(arguments)
    assert chat.chat_text(tokenizer, [QUESTION, CALL, QUESTION]) == expected
    parsed = {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Ulm"}}}]}
    if arguments != "text":
        assert chat.chat_text(tokenizer, [QUESTION, parsed, QUESTION]) == expected
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(TypeError, match=r"messages\[1\].tool_calls: no field"):
        chat.chat_text(tokenizer, [QUESTION, {**CALL, "content": "x"}])


def test_variables_of_the_template_are_read_or_refused() -> None:
    text = chat.chat_text(with_roles(), [QUESTION], variables={"enable_thinking": False})
    assert text == "[user]Hi[assistant](no)"
    for name in ("tools", "enable", "tokenize", "chat_template"):
        tokenizer = with_roles()
        tokenizer.chat_template += "{# tokenize chat_template #}"
        with pytest.raises(TypeError, match=f"{name}: no variable that the chat template reads"):
            chat.chat_text(tokenizer, [QUESTION], variables={name: []})


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    assert not chat.has_template(tokenizer)
    with pytest.raises(ValueError, match="tokenizer: expected one with a chat template"):
        chat.chat_prompt(tokenizer, [{"role": "user", "content": "x"}])


def test_generate_applies_the_template_of_the_target(capsys, instruct) -> None:
    words = ("generate", "Hi", "--target", instruct, *SHORT)
    prompts = {
        (): "[user]Hi<|eos|>[assistant]",
        ("--system", "Be brief."): "[system]Be brief.<|eos|>[user]Hi<|eos|>[assistant]",
        ("--raw",): "Hi",
    }
    model = AutoModelForCausalLM.from_pretrained(instruct)
    for options, prompt in prompts.items():
        status, out, _ = call(capsys, *words, *options, "--json")
        report = json.loads(out)
        assert (status, report["prompt"]) == (0, prompt)
        # The tokens are the text's, after nothing but the tokens that --raw needs.
        own = tiny.tokenizer()(prompt, add_special_tokens="--raw" in options, return_tensors="pt")
        plain = model.generate(**own, max_new_tokens=5, do_sample=False)
        assert report["tokens"] == plain[0, own.input_ids.shape[1] :].tolist()
        _, out, err = call(capsys, *words, *options, "--verbose")
        assert f"tokens:\n{prompt}\n" in err
        assert "Chain(" in err
        assert prompt not in out


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "none"])
def test_a_plan_is_made_for_the_prompts_that_generate_reads(
    capsys, monkeypatch, untrained, tmp_path, template
) -> None:
    target = with_template(untrained, tmp_path, template)
    planned: list[list[int]] = []

    def plan(levels: Any, prompts: list[list[int]], *others: Any, **options: Any) -> Any:
        planned[:] = prompts
        raise ValueError("seconds: expected more, given none")

    monkeypatch.setattr(command, "plan", plan)
    for options in ((), ("--raw",)):
        _, out, _ = call(capsys, "generate", "Hi", "--target", target, *SHORT, *options, "--json")
        status, _, err = call(capsys, "plan", "Hi", "--target", target, *options)
        assert (status, "--seconds" in err) == (2, True)
        tokenizer = AutoTokenizer.from_pretrained(target)
        special = template is None or bool(options)  # a template writes them itself
        text = json.loads(out)["prompt"]
        assert planned == [tokenizer(text, add_special_tokens=special).input_ids]
    # Of texts to go on with, the built-in questions ask for an answer.
    for options in ((), ("--raw",)):
        assert call(capsys, "plan", "--target", target, *options)[0] == 2
        asks = tokenizer.decode(planned[0])
        assert asks.endswith("[assistant]" if template and not options else "\nAnswer:")
    assert call(capsys, "plan", " ", "--target", target)[2].startswith("error: ")


def test_a_target_without_a_template_continues_text(capsys, untrained, tmp_path) -> None:
    base = with_template(untrained, tmp_path, None)
    _, out, _ = call(capsys, "generate", "Hi", "--target", base, *SHORT, "--json")
    assert json.loads(out)["prompt"] == "Hi"
    for words, text in (
        (("generate", "Hi", "--system", "x"), "--system: expected a target with a chat template"),
        (("chat",), "--target: expected a model whose tokenizer has a chat template"),
    ):
        status, out, err = call(capsys, *words, "--target", base)
        assert (status, out) == (2, "")
        assert text in err


def test_a_target_alone_looks_drafts_up_and_says_so(capsys, monkeypatch, instruct) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one two one two\n/quit\n"))
    _, out, err = call(capsys, "chat", "--target", instruct, *SHORT, "--stats")
    assert "no --draft: prompt lookup drafts" in err
    assert "2 prompt lookup" in err
    status, generated, err = call(
        capsys, "generate", "one two one two", "--target", instruct, *SHORT
    )
    assert "prompt lookup" not in err
    assert (status, generated) == (0, out)


def test_a_conversation_is_read_again_with_every_turn(capsys, monkeypatch, instruct) -> None:
    lines = "one\n\n/what\ntwo\n/reset\nthree\n/quit\nfour\n"
    words = ("--target", instruct, "--draft", "prompt-lookup", "--system", "S", *SHORT)
    status, shown, prompts = talk(capsys, monkeypatch, lines, *words)
    assert status == 0
    begin = "[system]S<|eos|>[user]"
    assert prompts[0] == f"{begin}one<|eos|>[assistant]"
    assert prompts[1].startswith(prompts[0])
    assert prompts[1].endswith("<|eos|>[user]two<|eos|>[assistant]")
    assert len(prompts[1]) > len(prompts[0]) + len("<|eos|>[user]two<|eos|>[assistant]")
    assert prompts[2:] == [f"{begin}three<|eos|>[assistant]"]
    assert shown.count("tokens/s") == 3
    assert "given /what" in shown
    assert "forgotten" in shown


def test_a_conversation_ends_with_stdin_and_shows_what_is_asked_for(capsys, monkeypatch) -> None:
    status, shown, prompts = talk(
        *(capsys, monkeypatch, "one\ntwo", *SHORT, "--stats", "--verbose")
    )
    assert status == 0
    assert len(prompts) == 2
    assert all(f"tokens:\n{prompt}\n" in shown for prompt in prompts)
    assert shown.count("ms/pass") == 2


def test_commands_of_a_conversation(capsys, monkeypatch, instruct, tmp_path) -> None:
    files = [tmp_path / name for name in ("first.json", "second.json", "none/third.json")]
    lines = [
        "/retry", "/help", "/reset now", "/save", "/sytem S", f"/save {files[2]}",
        "/usr/bin is a folder", f"/save {files[0]}", "/retry", f"/save {files[1]}",
        "/system Be brief.", "two", "/system", "three", "/quit",
    ]  # fmt: skip
    words = ("--target", instruct, "--system", "S", "--temperature", "1.5", "--seed", "3", *SHORT)
    status, shown, prompts = talk(capsys, monkeypatch, "\n".join(lines), *words)
    assert status == 0
    known = "/help, /reset, /retry, /system TEXT, /save FILE, /quit"
    assert (
        f"error: expected a message or a command, given /sytem; the commands are {known}" in shown
    )
    assert "  /save FILE    write the conversation" in shown
    for wrong in (
        "/retry: expected a question before it", "expected nothing behind /reset, given 'now'",
        "/save: expected a file, given none",
        f"/save: expected a file to write, given {files[2]}: No",
    ):  # fmt: skip
        assert f"error: {wrong}" in shown
    first = "[user]/usr/bin is a folder<|eos|>[assistant]"
    assert prompts == [
        *[f"[system]S<|eos|>{first}"] * 2,
        "[system]Be brief.<|eos|>[user]two<|eos|>[assistant]",
        "[user]three<|eos|>[assistant]",
    ]
    # The answer of another seed, which is shown, replaces the last one.
    one, other = (json.loads(file.read_text()) for file in files[:2])
    assert [message["role"] for message in other] == ["system", "user", "assistant"]
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert shown.count("\n--seed ") == 1


def test_a_system_prompt_that_the_template_refuses_changes_nothing(capsys, monkeypatch) -> None:
    status, shown, prompts = talk(capsys, monkeypatch, "one\n/system S\ntwo\n", *SHORT)
    assert status == 0
    assert "error: system: expected a conversation that the chat template takes" in shown
    assert prompts[1].startswith(prompts[0])


@pytest.mark.parametrize(
    "before",
    ["", "sys.modules['readline'] = None", "import readline; readline.__doc__ = 'libedit'"],
)
def test_pasted_lines_are_one_message(before: str, tmp_path: Path) -> None:
    """In a terminal, which puts marks around pasted lines, and without readline as well."""
    pty = pytest.importorskip("pty")
    off = tmp_path / "inputrc"  # as readline before 8.1 has it
    off.write_text("set enable-bracketed-paste off\n")
    master, slave = pty.openpty()
    code = f"import sys; {before}\nfrom polyspec_ext import cli; sys.exit(cli.main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "chat", "--max-new-tokens", "3"],
        stdin=slave, stdout=slave, stderr=slave,
        env={**os.environ, "TERM": "xterm", "INPUTRC": str(off)},
    ) as process:  # fmt: skip
        os.close(slave)
        shown = b""

        def enter(text: str, wanted: bytes) -> None:
            nonlocal shown
            while not shown.rstrip().endswith(wanted):
                shown += os.read(master, 4096)
            asked = b"\x1b[?2004h" in shown  # for the marks, which it leaves out otherwise
            os.write(master, (text if asked else re.sub("\x1b\\[20[01]~", "", text)).encode())
            shown = b""

        file = tmp_path / "talk.json"
        enter("\x1b[200~first line\rsecond line\x1b[201~\r", b">")
        enter(f"/save {file}\r", b">")
        enter("/quit\r", b">")
        assert process.wait(60) == 0
    os.close(master)
    assert json.loads(file.read_text())[0]["content"] == "first line\nsecond line"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(capsys, monkeypatch, instruct) -> None:
    """Keep answers in the conversation, and no question without an answer."""
    stops = iter([(3, 1), (0, 1), (100, 0)])  # the second while the prompt is read
    cached: list[tuple[int, int]] = []

    class Interrupted(ps.Stream):
        def __iter__(self) -> Iterator[int]:
            stop, times = next(stops)
            cached.append((self.stats.num_prompt_tokens, self.stats.num_cached_tokens))
            for number in range(8):
                for _ in range(times if number == stop else 0):
                    signal.raise_signal(signal.SIGINT)
                yield next(self)

    monkeypatch.setattr("polyspec_ext.chain.Stream", Interrupted)
    words = ("--target", instruct, "--max-new-tokens", "8")
    status, shown, prompts = talk(capsys, monkeypatch, "one\ntwo\nthree\n", *words)
    assert status == 0
    assert shown.count("ended by Ctrl-C") == 2
    assert "4 tokens, " in shown
    assert prompts[1].endswith("<|eos|>[user]two<|eos|>[assistant]")
    assert prompts[2] == prompts[1].replace("]two<", "]three<")
    (first, none), (_, some), (third, after) = cached
    assert (none, some) == (0, first + 3)  # the last token has not been read
    assert after == some  # the second was interrupted in its first round
    assert f"prompt of {third} tokens, {third - after} read" in shown


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_long_prompt_is_read_with_a_bar(capsys, monkeypatch, instruct, command, terminal) -> None:
    """By tokens, and before the text alone: the draft level reads it later, for the second token.
    Off a terminal, a line from time to time."""
    monkeypatch.setattr("polyspec_ext.progress.on_terminal", lambda: terminal)
    monkeypatch.setattr("polyspec_ext.progress._SECONDS", 0.0)
    monkeypatch.setattr(
        ps.policies.Joint, "next", lambda self, report: [2 * bool(report.committed)]
    )
    draft = tiny.path("drafter")
    words = ("--target", instruct, "--draft", draft, "--window", "2", "--policy", "joint", *SHORT)
    long = "a b " * 400
    monkeypatch.setattr("sys.stdin", io.StringIO(f"Hi\n{long}\n"))
    _, out, err = call(capsys, command, *([long] if command == "generate" else []), *words)
    bars = re.findall(r"(\w+) reads the prompt; Ctrl-C ends it: .*?/(\d+) ", err)
    assert {(name, int(tokens) > 1000) for name, tokens in bars} == {(instruct.name, True)}, err
    assert "reads" not in out
    assert ("\r" in err) == terminal


def test_ctrl_c_ends_the_reading_of_a_prompt(capsys, monkeypatch, instruct) -> None:
    pieces: list[int] = []
    run = ps.HuggingFaceLevel.run

    def noted(level: ps.HuggingFaceLevel, block: Any) -> Any:
        if block.tokens.shape[1] > 100:
            pieces.append(block.tokens.shape[1])
            signal.raise_signal(signal.SIGINT)
        return run(level, block)

    monkeypatch.setattr(ps.HuggingFaceLevel, "run", noted)
    lines = f"Hi\n{'a b ' * 400}\nSo?\n"
    _, shown, prompts = talk(capsys, monkeypatch, lines, "--target", instruct, *SHORT)
    assert shown.count("ended by Ctrl-C") == len(pieces) == 1
    assert prompts[-1].startswith(prompts[0])
    assert prompts[-1].endswith("[user]So?<|eos|>[assistant]")
    assert "a b a b" not in prompts[-1]


def test_ctrl_c_between_answers_says_how_to_end(capsys, monkeypatch) -> None:
    class Keys(io.StringIO):
        def readline(self, *_: Any) -> str:
            line = super().readline()
            if line == "^C\n":
                signal.raise_signal(signal.SIGINT)
            return line

    monkeypatch.setattr("sys.stdin", Keys("^C\nHi\n"))
    status, _, err = call(capsys, "chat", *SHORT)
    assert status == 0
    assert err.count("/quit") == 2  # at the beginning, and now
    assert "tokens/s" in err


def test_turns_that_the_context_has_no_room_for_are_left_out(
    capsys, monkeypatch, untrained, tmp_path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(untrained / "target")
    model.config.max_position_embeddings = 48
    place = with_template(untrained, tmp_path, TEMPLATE)
    model.save_pretrained(place)
    lines = f"1111\n2222\n3333\n{'4' * 60}\n5\n"
    words = ("--target", place, "--max-new-tokens", "9")
    status, shown, prompts = talk(capsys, monkeypatch, lines, *words)
    assert status == 0
    assert "1111" in prompts[0]
    assert "1111" not in prompts[-1]
    assert prompts[-1].endswith("[user]5<|eos|>[assistant]")
    assert "the context of 48 tokens has no room for the oldest" in shown
    assert "error: message: expected fewer than 48 tokens with the chat template" in shown
    assert not any("4444" in prompt for prompt in prompts)


@pytest.mark.parametrize("words", [["generate", "-"], ["chat"]])
def test_bytes_that_are_no_text_are_refused(capsys, monkeypatch, words) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    status, out, err = call(capsys, *words)
    assert (status, out) == (2, "")
    assert "expected UTF-8 text" in err


def test_a_chain_answers_messages(instruct: Path) -> None:
    """In pieces, as `stream` gives the tokens of the prompt that the template makes."""
    chain = ps.Chain([instruct, "prompt-lookup"], dtype="float32")
    messages = [{"role": "user", "content": "Hi"}]
    answer = chain.chat(messages, 9, system="S")
    assert answer.prompt.text == "[system]S<|eos|>[user]Hi<|eos|>[assistant]"
    assert (answer.left_out, answer.limit, answer.text) == (0, 9, "")
    pieces = list(answer)
    tokens = list(chain.stream(answer.prompt.input_ids, 9))
    tokenizer = AutoTokenizer.from_pretrained(instruct)
    assert answer.tokens == tokens
    assert "".join(pieces) == answer.text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.stats.num_new_tokens == len(tokens)
    assert answer.message == {"role": "assistant", "content": answer.text}
    # The conversation goes on, with a system prompt in its first message or as one.
    messages += [answer.message, {"role": "user", "content": "So?"}]
    second = chain.chat(messages, 4, temperature=1.0, seed=3, system="S")
    same = chain.chat([{"role": "system", "content": "S"}, *messages], 4, temperature=1.0, seed=3)
    assert second.prompt == same.prompt
    assert second.prompt.text.startswith(answer.prompt.text + answer.text)
    assert list(same) == [*chain.chat(messages, 4, temperature=1.0, seed=3, system="S")]
    assert messages[0] == {"role": "user", "content": "Hi"}


def test_texts_and_their_answers(instruct: Path, untrained: Path, tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    texts = ["2 + 2 =", "How many legs have 3 cows?"]
    bare = with_template(untrained, tmp_path, None)
    for place, raw in ((instruct, False), (instruct, True), (bare, False)):
        templated = place == instruct and not raw
        chain = ps.Chain([place, "prompt-lookup"])
        out = chain.generate_text(texts, [3, 7], raw=raw, eos_token_id=[])
        read = [f"[user]{t}{tokenizer.eos_token}[assistant]" if templated else t for t in texts]
        ids = [tokenizer(t, add_special_tokens=not templated)["input_ids"] for t in read]
        same = chain.generate(ids, [3, 7], eos_token_id=[])
        assert same.sequences.equal(out.sequences)
        assert [len(new) for new in out.new_tokens] == [3, 7]
        assert out.text == same.text == [tokenizer.decode(new) for new in out.new_tokens]
        one = chain.generate_text(texts[0], 3, raw=raw, eos_token_id=out.new_tokens[0][-1])
        assert len(one.text) == 1
        assert one.new_tokens[0] == out.new_tokens[0][: len(one.new_tokens[0])]
    system = ps.Chain([instruct]).generate_text(texts[0], 3, system="Be brief.")
    assert (
        system.stats.num_prompt_tokens
        > ps.Chain([instruct]).generate_text(texts[0], 3).stats.num_prompt_tokens
    )
    special = ps.Output(out.sequences, out.stats, tokenizer=out.tokenizer)
    special.new_tokens = [[*ids[0], tokenizer.eos_token_id], []]
    assert special.text == [texts[0], ""]
    copied = pickle.loads(pickle.dumps(out))
    assert copied.text == out.text
    assert len(pickle.dumps(out)) < 2**20  # no weights


def test_texts_without_a_tokenizer(untrained: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(untrained / "target")
    model.name_or_path = ""
    chain = ps.Chain([model])
    with pytest.raises(ValueError, match=r"generate_text: expected a target with a tokenizer"):
        chain.generate_text("2 + 2 =")
    with pytest.raises(ValueError, match=r"text: expected .*given LlamaForCausalLM"):
        _ = chain.generate([3, 4], 2).text
    plain = ps.Chain([with_template(untrained, tmp_path, None)])
    for bad, error in (([], ValueError), (3, TypeError), ([3], TypeError)):
        with pytest.raises(error, match=r"prompt: |input_ids: "):
            plain.generate_text(bad, 2)
    with pytest.raises(ValueError, match="system: expected a target with a chat template"):
        plain.generate_text("2 + 2 =", 2, system="Be brief.")
    with pytest.raises(TypeError, match=r"temprature: .*did you mean temperature"):
        plain.generate_text("2 + 2 =", 2, temprature=1)


# Refuses an answer without a question or result before it, and a result without a call.
STRICT = (
    "{% for m in messages %}"
    "{% set before = messages[loop.index0 - 1].role if loop.index0 else '' %}"
    "{% if m.role not in {'': ['system', 'user'], 'system': ['user'], 'user': ['assistant'], "
    "'assistant': ['user', 'tool'], 'tool': ['tool', 'assistant']}[before] %}"
    "{{ raise_exception(m.role ~ ' after ' ~ before) }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}[assistant]"
)


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "S"}]])
@pytest.mark.parametrize("context", [40, 200, 900, 10**6])
def test_whole_exchanges_are_left_out_by_halving(monkeypatch, context, system) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = STRICT
    messages = [*system]
    for number in range(100):
        messages.append({"role": "user", "content": f"{number}?"})
        for _ in range(number % 3):  # calls and results
            messages.append({"role": "assistant", "content": "call"})
            messages += [{"role": "tool", "content": "1"}] * (number % 2 + 1)
        messages.append({"role": "assistant", "content": "so"})
    messages.append({"role": "user", "content": "last"})
    rendered: list[list[dict[str, str]]] = []
    apply = tokenizer.apply_chat_template

    def counted(conversation: list[dict[str, str]], **options: Any) -> Any:
        rendered.append(conversation)
        return apply(conversation, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    fitted = chat.fitted_prompt(tokenizer, messages, None, 10, context)
    assert len(rendered) <= 9
    rest = messages[len(system) + fitted.left_out :]
    assert rest[0]["role"] == "user"
    assert fitted.prompt == chat.chat_prompt(tokenizer, [*system, *rest])
    room = context - len(fitted.prompt.input_ids)
    assert room >= fitted.limit == 10
    last = chat.fitted_prompt(tokenizer, messages[-1:], None, 10**9, context)
    assert last.limit == context - len(last.prompt.input_ids)
    # No exchange more than it takes.
    more = next((n for n in range(fitted.left_out - 1, -1, -1)
                 if messages[len(system) + n]["role"] == "user"), None)  # fmt: skip
    assert (more is None) == (context == 10**6)
    if more is not None:
        longer = chat.chat_prompt(tokenizer, [*system, *messages[len(system) + more :]])
        assert len(longer.input_ids) + 10 > context


def test_chat_refuses(untrained: Path, tmp_path: Path, instruct: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chain = ps.Chain([with_template(untrained, tmp_path, None)], dtype="float32")
    with pytest.raises(ValueError, match="chat: expected a target with a chat template beside it"):
        chain.chat(messages)
    chain = ps.Chain([instruct], dtype="float32")
    with pytest.raises(ValueError, match="max_new_tokens: expected"):
        chain.chat(messages, -1)
    with pytest.raises(TypeError, match="messages: expected mappings"):
        chain.chat("Hi")
    with pytest.raises(TypeError, match="chat"):
        chain.chat(messages, max_length=3)


def test_the_tokenizers_end_ends_an_answer(instruct: Path) -> None:
    """As of fine-tunes with another end in their configuration: the answer went on into the next
    turn."""
    chain = ps.Chain([str(instruct)], pack=False)
    level, tokenizer = chain.levels[0], tiny.tokenizer()
    level.model.generation_config.eos_token_id = level.model.config.eos_token_id = 7
    answer = chain.chat([{"role": "user", "content": "Hi"}], max_new_tokens=4)
    assert answer.ends == {7, tokenizer.eos_token_id}
    other = chain.chat([{"role": "user", "content": "Hi"}], max_new_tokens=4, eos_token_id=9)
    assert other.ends == {9}


def test_the_tokenizers_end_ends_an_answer_to_a_text(untrained, tmp_path, capsys) -> None:
    """In `generate_text` and `generate`, where the chat template reads the prompt."""
    place = with_template(untrained, tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    chain = ps.Chain([place], pack=False)
    (whole,) = chain.generate_text("Hi", 8, **drawn, eos_token_id=[]).new_tokens
    end = next(n for n, token in enumerate(whole) if n and token not in whole[:n])
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(whole[end])
    tokenizer.save_pretrained(place)
    chain = ps.Chain([place], pack=False)
    assert chain.generate_text("Hi", 8, **drawn).new_tokens == [whole[: end + 1]]
    words = ["generate", "Hi", "--target", str(place), "--max-new-tokens", "8", "--json"]
    assert cli.main([*words, "--temperature", "1", "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == whole[: end + 1]
