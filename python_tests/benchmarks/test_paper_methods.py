"""``paper``: what the keys of methods stand for, the same accounting for all, and presets."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import polyspec_ext as ps
from benchmarks.__main__ import main
from benchmarks.generation_calls import Request
from benchmarks.paper import prepare, presets, record, report
from benchmarks.paper.methods import Call, Method, default_keys, read_keys
from benchmarks.paper.parts import Parts, Places, Tree, shipped
from benchmarks.paper.report.tables.speedups import windows_of
from benchmarks.weights import parameters, weight_bytes
from polyspec_ext import tiny
from polyspec_ext.drafters.eagle import HeadPasses

ALL = (
    "plain", "generate", "assisted:drafter", "drafter", "prompt-lookup", "suffix", "w4",
    "eagle2", "eagle2-chain", "w4+drafter", "w4+eagle2", "w4+middle+drafter", "online:drafter",
    "joint:middle+drafter", "cascade:w4+middle+drafter",
)  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    # A copy that lies there is not calibrated anew.
    folder = tmp_path_factory.mktemp("w4")
    ps.save_w4(ps.quantize_w4(tiny.grown(1)), folder)
    return Parts(shipped(w4=folder))


def test_keys() -> None:
    made = {one.name: one for one in read_keys(ALL, shipped())}
    assert tuple(made) == ALL
    assert [one.name for one in made.values() if one.baseline] == ["plain"]
    kinds = {name: one.kind for name, one in made.items()}
    assert kinds["assisted:drafter"] == "assisted"
    assert kinds["eagle2"] == kinds["eagle2-chain"] == "eagle"
    assert made["eagle2-chain"].tree is None
    assert kinds["w4+eagle2"] == kinds["w4+middle+drafter"] == kinds["suffix"] == "chain"
    assert kinds["online:drafter"] == "adaptive"
    assert made["joint:middle+drafter"].policy == "joint"
    assert made["drafter"].windows == tiny.WINDOWS["target", "drafter"]
    assert made["w4+eagle2"].tree == {"top_k": 4, "total_tokens": 12, "depth": 5}
    assert made["w4+eagle2"].windows == (9, 5)
    assert made["w4+middle+drafter"].levels == ("target", "w4", "middle", "drafter")
    # Two rounds of every level between: as many tokens as they can bring.
    cascade = made["cascade:w4+middle+drafter"]
    k = made["w4+middle+drafter"].windows[-1]  # type: ignore[index]
    inner = 2 * (k + 1)
    assert cascade.windows == (2 * (inner + 1), inner, k)
    assert cascade.rounds == (2, 2)
    for one in made.values():
        assert Method.from_dict(json.loads(json.dumps(asdict(one)))) == one


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        (["plain", "plain"], "each method once, given plain again"),
        (["drafter"], "expected plain or plain-compiled among them"),
        (["plain", "plain-compiled"], "without --no-compile"),
        (["plain", "w5"], "given 'w5'"),
        (["plain", "drafter+middle+drafter"], "given 'drafter.middle.drafter'"),
        (["plain", "best:drafter"], "given 'best:drafter'"),
        (["plain", "assisted:w4"], "given 'assisted:w4'"),
        (["plain", "generate-static"], "given 'generate-static'"),
        (["plain", "suffix+drafter"], "suffix.* last of the levels"),
        (["plain", "cascade:drafter"], "at least three levels, given two"),
    ],
)
def test_keys_that_are_none(keys: list[str], wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"--methods: .*{wrong}"):
        read_keys(keys, shipped())


def test_defaults() -> None:
    keys = default_keys(shipped(), True, True)
    made = read_keys(keys, shipped(), compile=True)
    assert [one.name for one in made if one.baseline] == ["plain-compiled"]
    assert {len(one.levels) for one in made} == {1, 2, 3, 4}
    # A preset: no draft model, one head.
    other = Places("x", {}, {"eagle2": "y"}, Tree())
    keys = default_keys(other, True, False)
    assert keys[:4] == ["plain", "plain-compiled", "generate", "generate-static"]
    assert {"eagle2", "w4", "w4+eagle2", "planned"} <= set(keys)
    assert not any("assisted" in key for key in keys)
    made = read_keys(keys, other, on_cpu=False, compile=True)
    assert next(one for one in made if one.name == "eagle2").windows == (6,)
    assert "w4+eagle2" in default_keys(shipped(times=2), False, True)
    # Not what answers one prompt at a time.
    assert not any("assisted" in key for key in default_keys(shipped(), True, True, batch=2))


def test_every_method_counts_up_to_the_eos(parts: Parts) -> None:
    tokenizer = parts.tokenizer
    prompt = tokenizer(tiny.prompt_of("Tom has 3 bags of 8 apples. How many?")).input_ids
    request = Request([prompt], 16, 0.0, [0])
    made = [Call(one, parts) for one in read_keys(ALL, shipped())]
    (whole,) = made[0].answer(request).texts
    assert len(whole) == 16
    config = parts.eager.model.generation_config
    # An id that the text has further on, so that drafts go beyond it.
    end = next(token for n, token in enumerate(whole) if n > 5 and token not in whole[:n])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "eos_token_id", [end])
        cut = whole[: whole.index(end) + 1]
        for method in read_keys(ALL, shipped()):
            call = Call(method, parts)
            answer = call.answer(request)
            assert answer.texts == [cut], method.name
            if answer.stats is None:
                assert method.kind in ("generate", "assisted")
                continue
            assert answer.stats.num_new_tokens == len(cut)
            names = [level.name for level in answer.stats.levels]
            assert names == list(method.levels)
            assert sum(answer.stats.levels[0].emitted_per_verification) == len(cut)


def test_sampled_turns_are_the_targets_own(parts: Parts, tmp_path: Path) -> None:
    place = tmp_path / "question.jsonl"
    rows = [
        {"question_id": n, "category": "qa", "turns": [f"Tom has {n} apples and buys 2. How many?"]}
        for n in range(3)
    ]
    place.write_text("\n".join(map(json.dumps, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "surroundings", lambda *_, **__: {})
        patch.setattr(report, "run", lambda _: 0)
        status = main(
            [
                "paper", "--output", str(tmp_path / "run"), "--questions", str(place),
                "--methods", "plain,generate,drafter", "--temperature", "0.7", "--no-compile",
                "--plan-seconds", "0", "--max-new-tokens", "20",
            ]
        )  # fmt: skip
    assert status == 0
    run = record.read_run(tmp_path / "run")
    for name in ("plain", "generate", "drafter"):
        own = [turn.lossless for turn in run.turns if turn.method == name]
        total = sum(one["surprise"] for one in own if one is not None)
        variance = sum(one["variance"] for one in own if one is not None)
        assert len(own) == 3
        assert abs(total) < 5 * variance**0.5
    texts = {turn.method: turn.tokens for turn in run.turns if turn.question_id == 0}
    assert texts["plain"] != texts["generate"]


def asked(**options: float) -> argparse.Namespace:
    """Of every method, one prompt in a call."""
    return argparse.Namespace(temperature=0.0, batch=1, **options)


class Clock:
    """Moves by what passes cost, and a little whenever somebody looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def behind(self, call: Callable[..., Any], seconds: Callable[[Any], float]) -> Any:
        """Return `call`, a method, whose object says what a call costs."""

        def timed(own: Any, *arguments: Any, **options: Any) -> Any:
            self.now += seconds(own)
            return call(own, *arguments, **options)

        return timed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(time, "perf_counter", own)
    for kind, name, seconds in (
        (ps.HuggingFaceLevel, "forward", lambda level: 1e-3 * level.num_layers),
        (HeadPasses, "_pass", lambda _: 1e-3),
    ):
        monkeypatch.setattr(kind, name, own.behind(getattr(kind, name), seconds))
    return own


def test_windows_are_the_planners(parts: Parts, clock: Clock) -> None:
    keys = (
        "plain", "drafter", "eagle2", "joint:middle+drafter", "cascade:middle+drafter", "planned",
    )  # fmt: skip
    prompt = parts.tokenizer(tiny.prompt_of("How many legs have 2 cows?")).input_ids
    planned, prediction = prepare.planned(
        read_keys(keys, shipped()),
        parts,
        [prompt],
        asked(max_new_tokens=12, plan_seconds=0.5),
    )
    made = {one.name: one for one in planned}
    assert tuple(made) == keys
    assert set(prediction) == {"plain", "drafter", "eagle2", "planned"}
    # The window of trees is how deep they are.
    tree = made["eagle2"].tree
    assert tree is not None
    assert made["eagle2"].windows == (tree["depth"],)
    for name, given in prediction.items():
        assert given["tokens_per_second"] > 0
        assert tuple(given["windows"]) == (made[name].windows or ())
    best = max(prediction.values(), key=lambda one: one["tokens_per_second"])
    assert prediction["planned"]["tokens_per_second"] >= best["tokens_per_second"]
    assert made["planned"].levels[0] == "target"
    assert made["planned"].label.startswith("planned: target")
    # Those of a cascade are its own.
    assert made["cascade:middle+drafter"].rounds == (2,)
    call = Call(made["planned"], parts)
    assert len(call.answer(Request([prompt], 6, 0.0, [0])).texts[0]) <= 6


def test_a_planned_tail_is_run(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(
        levels=("target", "middle", "drafter"), windows=(5, 3), rounds=(2,), rule="token", tail=2,
        predicted_decode_tokens_per_second=1.0,
    )  # fmt: skip
    answer = SimpleNamespace(candidates=[one], recommended=one)
    monkeypatch.setattr(prepare, "plan", lambda *_, **__: answer)
    methods = read_keys(("plain", "middle+drafter"), shipped())
    given = asked(max_new_tokens=6, plan_seconds=1.0)
    (_, method), _ = prepare.planned(methods, parts, [[1, 2]], given)
    assert (method.windows, method.tail) == ((5, 3), 2)
    assert windows_of(asdict(method)) == "5, 3; tail 2"
    prompt = parts.tokenizer(tiny.prompt_of("How many legs have 2 cows?")).input_ids
    stats = Call(method, parts).answer(Request([prompt], 20, 0.0, [0])).stats
    assert stats is not None
    assert stats.levels[0].num_tails > 0


def test_a_target_that_is_grown_says_the_same() -> None:
    small, grown = Parts(shipped()), Parts(shipped(times=2))
    prompt = small.tokenizer(tiny.prompt_of("How many legs have 2 cows?")).input_ids
    request = Request([prompt], 12, 0.0, [0])
    assert grown.eager.model.config.hidden_size == 2 * small.eager.model.config.hidden_size
    texts = [
        Call(method, parts).answer(request).texts
        for parts in (small, grown)
        for method in read_keys(("plain", "eagle2"), parts.places)
    ]
    # (A target in bfloat16 may part from them.)
    same = grown.eager.model.dtype == small.eager.model.dtype
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert texts[0] == texts[2] or not same
    places = {one["name"]: one["place"] for one in grown.facts()}
    assert places["eager target"] == "shipped target, grown 2 times"
    assert places["eagle2"] == "shipped eagle2, grown 2 times"


def test_bytes_that_a_pass_reads(parts: Parts) -> None:
    model = parts.eager.model
    # The shipped models' head is their input embeddings.
    assert weight_bytes(model) >= sum(p.numel() * p.element_size() for p in model.parameters())
    copy = weight_bytes(parts.model("w4").model)
    layers = [one for one in model.modules() if type(one).__name__ == "Linear"]
    # The copy's head is in 4 bits as well: the embeddings are only looked up in.
    packed = sum(one.weight.numel() for one in layers)
    less = packed * 4 - packed // 2 - packed // 128 * 4  # bf16 scales and zeros
    assert weight_bytes(model) - copy == pytest.approx(less, rel=0.02)
    head = model.lm_head.weight.numel()  # tied there, and its own in the copy
    own = sum(p.numel() for p in model.parameters())
    assert (parameters(model), parameters(parts.model("w4").model)) == (own, own + head)


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_a_preset_that_is_not_here(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    preset = presets.PRESETS[name]
    assert main(["paper", "--preset", name, "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"  hf download {preset.target}\n" in error
    assert f"  hf download {preset.eagle2}\n" in error
    assert ("hf auth login" in error) == preset.target.startswith("meta-llama")
    assert not (tmp_path / "run").exists()


def test_a_preset_whose_target_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    here = str(tiny.path("target"))
    assert main(["paper", "--preset", "vicuna-7b", "--target", here]) == 2
    error = capsys.readouterr().err
    assert "hf download yuhuili/EAGLE-Vicuna-7B-v1.3" in error
    assert "lmsys" not in error
    assert "hf auth login" not in error
    assert main(["paper", "--target", "meta-llama/Llama-2-7b-hf"]) == 2
    assert "hf auth login" in capsys.readouterr().err
    # One that is there without all of its weights is not there.
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text("{}")
    assert presets.local(str(half)) is None
    index = {"weight_map": {"a": "one.safetensors"}}
    (half / "model.safetensors.index.json").write_text(json.dumps(index))
    assert presets.local(str(half)) is None
    (half / "one.safetensors").touch()
    assert presets.local(str(half)) == half
    file = tmp_path / "one.gguf"
    assert presets.local(str(file)) is None
    file.touch()
    assert presets.local(str(file)) == file


def test_models_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "question.jsonl"
    place.write_text(json.dumps({"question_id": 1, "category": "rag", "turns": ["So?"]}))
    monkeypatch.setattr(prepare, "surroundings", lambda *_, **__: {})
    monkeypatch.setattr(report, "run", lambda _: 0)
    folder = tmp_path / "run"
    command = [
        "paper", "--output", str(folder), "--questions", str(place), "--no-compile",
        "--target", str(tiny.path("target")), "--draft", f"small={tiny.path('drafter')}",
        "--eagle2", str(tiny.path("eagle2")), "--plan-seconds", "0", "--max-new-tokens", "4",
        "--methods", "plain,small,assisted,eagle2",
    ]  # fmt: skip
    assert main(command) == 0
    run = record.read_run(folder)
    assert run.facts["settings"]["template"] == "chat"
    assert [turn.method for turn in run.turns if turn.ok] == [
        "plain", "small", "assisted", "eagle2",
    ]  # fmt: skip
    assert [level.name for level in run.turns[1].levels] == ["target", "small"]
    eagle = next(one for one in run.facts["methods"] if one["name"] == "eagle2")
    assert eagle["tree"] == {"top_k": 10, "total_tokens": 60, "depth": 6}
    assert str(tmp_path) not in (folder / record.FACTS).read_text()
    assert main(["paper", "--draft", "x=y"]) == 2
    assert "expected a --target with them" in capsys.readouterr().err
    for name in ("w4=y", "eagle2=y", "a+b=y", "=y"):
        assert main([*command, "--draft", name]) == 2
        assert "--draft: expected NAME=MODEL" in capsys.readouterr().err
