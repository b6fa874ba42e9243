"""Heads that are trained for a target that is there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mtp_heads
import pytest
import torch
from safetensors.torch import load_file
from small_models import V, make

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.cli import run_command
from polyspec_ext.drafters.mtp import load_mtp, new_mtp
from polyspec_ext.levels import HuggingFaceLevel, load
from polyspec_ext.tensors import RowCounts
from training.__main__ import make_parser
from training.session import HeadTraining, Settings, Steps
from training.texts import Document, Stream, documents_of, frequent, read_texts, split
from training.unrolled import States, Teacher, Unrolled

SMALL = Settings(draft_vocab=64, inner=32, length=24, batch=2, block=4, rate=3e-3)
MTP = replace(SMALL, version=0, draft_vocab=None, inner=None)


def own_texts(model: Any, count: int) -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    ids = model.config.vocab_size
    prompts = torch.randint(0, ids, (count, 4), generator=generator).tolist()
    chain = ps.Chain([ps.Level(model)])
    out = chain.generate(prompts, max_new_tokens=30, temperature=1.0, seed=0)
    return [Document(row, 4) for row in out.sequences]


def require_in_use(chain: ps.Chain, documents: list[Document], overlap: float) -> None:
    """Compare acceptance over 800 draft tokens with the report."""
    prompts = [document.ids[:4].tolist() for document in documents[:16]]
    out = chain.generate(prompts, 100, temperature=1.0, seed=0)
    assert abs(out.stats.levels[0].draft_acceptance_rate - overlap) < 0.05


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_trained_head_drafts_what_its_target_accepts(family: str, tmp_path: Path) -> None:
    model = make(family, 4).requires_grad_(False)
    # A few numbers of a state are far larger than the others, as in many models.
    model.get_input_embeddings().weight[:, :4] *= 20
    documents = own_texts(model, 24)
    training = HeadTraining(model, documents, documents[:6], tmp_path, SMALL)
    before = training.report()
    training.run(tokens=12 * 4 * 24)
    after = training.report()
    assert after["tokens_read"] == 12 * 4 * 24
    for step in (1, 2):  # the first weights know the first step already
        assert after["overlap"][step] > before["overlap"][step] + 0.05
    level = HuggingFaceLevel(model)
    prompts = [document.ids[:8].tolist() for document in documents[:4]]
    plain = ps.Chain([level]).generate(prompts, max_new_tokens=24)
    out = ps.Chain([level, tmp_path], [3]).generate(prompts, max_new_tokens=24)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.levels[0].num_accepted_tokens > 0
    require_in_use(ps.Chain([level, tmp_path], [1]), documents, after["overlap"][0])


@pytest.mark.parametrize("rank", [0, 8])
def test_a_trained_drafter_of_blocks_is_accepted(rank: int, tmp_path: Path) -> None:
    """It learns its target's texts, in speculators' format, with fewer ids than the target has."""
    model = make("llama", 4).requires_grad_(False)
    documents = own_texts(model, 24)
    settings = replace(SMALL, block_size=4, layers=1, markov_rank=rank, rate=1e-2, epochs=6)
    training = HeadTraining(model, documents, documents[:6], tmp_path, settings)
    before = training.report()
    training.run(tokens=12 * 4 * 24)
    after = training.report()
    assert len(after["overlap"]) == (4 if rank else 3)
    assert after["overlap"][0] > before["overlap"][0] + 0.05
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == ("dspark" if rank else "dflash")
    level = HuggingFaceLevel(model)
    head = ps.DFlash.from_pretrained(tmp_path, level)
    assert head.config.hidden_layers == (2, 2, 1)
    require_in_use(ps.Chain([level, head], [1]), documents, after["overlap"][0])


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "deepseek_v3"])
def test_a_trained_mtp_head_is_read_and_accepted(family: str, tmp_path: Path) -> None:
    """In the layout of its target's family, or MiMo's; loaded, it drafts from the same logits."""
    model = make("llama", 4) if family == "llama" else mtp_heads.target_of(family)
    documents = own_texts(model.requires_grad_(False), 24)
    training = HeadTraining(model, documents, documents[:16], tmp_path, MTP)
    before = training.report()
    training.run(tokens=12 * 4 * 24)
    after = training.report()
    assert len(after["overlap"]) == 3
    assert sum(after["overlap"]) > sum(before["overlap"]) + 0.05
    names = load_file(tmp_path / "model.safetensors")
    first = {"llama": "model.mtp_layers.0.input_proj", "qwen3_5": "mtp.fc"}
    assert f"{first.get(family, 'model.layers.3.eh_proj')}.weight" in names
    # A plain pass of the trained weights over a text and the target's states of it.
    level = ps.Level(model)
    head = load_mtp(tmp_path, level)
    head.begin(1, 64)
    ids = documents[0].ids[None]
    with torch.no_grad():
        states = model.get_decoder()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        out = head.extend(ids[:, 1:], states, RowCounts([ids.shape[1] - 1]))
        teacher = Teacher(model, head.config, None)
        trained, _ = new_mtp(model)
        run = torch.load(tmp_path / "training" / "run.pt", weights_only=True)
        trained.load_state_dict({key: w.bfloat16() for key, w in run["head"].items()})
        padded = torch.cat([states, states[:, -1:]], 1)
        rows = States(ids, torch.ones_like(ids, dtype=torch.bool), padded, padded)
        (draft,) = Unrolled(trained, teacher, 1).drafts(rows)
        wanted = teacher.logits(draft.states[:, -1])
    assert (head.logits(out)[:, 0] - wanted).abs().max() < 1e-3 * wanted.abs().max()
    require_in_use(ps.Chain([level, f"mtp:{tmp_path}"], [1]), documents, after["overlap"][0])


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("settings", [SMALL, MTP], ids=["eagle3", "mtp"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(settings, tmp_path, monkeypatch) -> None:
    """Compare bit for bit, from the middle of a block; the target reads its states again."""
    model = make("llama", 4).requires_grad_(False)
    documents = own_texts(model, 16)

    def training(place: str, **options: Any) -> HeadTraining:
        return HeadTraining(model, documents, documents[:2], tmp_path / place, settings, **options)

    training("whole").run(tokens=3 * 4 * 24)

    step, done = Steps.step, []

    def stops(self: Steps, loss: torch.Tensor, way: float) -> None:
        if len(done) == 8:
            raise _Stopped
        done.append(way)
        step(self, loss, way)

    monkeypatch.setattr(Steps, "step", stops)
    with pytest.raises(_Stopped):
        training("parts").run(tokens=3 * 4 * 24, every=0)
    monkeypatch.undo()
    resumed = training("parts", resume=True)
    assert resumed.tokens == 4 * 24
    resumed.run(tokens=3 * 4 * 24)

    names = ("model.safetensors", "config.json")
    for name in names:
        whole, parts = ((tmp_path / one / name).read_bytes() for one in ("whole", "parts"))
        assert whole == parts


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    model = make("llama", 4).requires_grad_(False)
    documents = own_texts(model, 8)

    def training(settings: Settings = SMALL, texts: int = 8, **options: Any) -> HeadTraining:
        own = documents[:texts]
        return HeadTraining(model, own, documents[:1], tmp_path, settings, **options)

    with pytest.raises(ValueError, match=r"^resume: expected a run that was begun, given none"):
        training(resume=True)
    training().save()
    with pytest.raises(ValueError, match=r"^resume: expected --resume, or another --output"):
        training()
    other = replace(SMALL, rate=0.5)
    with pytest.raises(ValueError, match=r"^rate: expected 0\.003, .* given 0\.5"):
        training(other, resume=True)
    with pytest.raises(ValueError, match=r"^texts: expected"):
        training(texts=7, resume=True)


def test_targets_that_no_head_can_learn_from_are_refused(tmp_path: Path) -> None:
    capped = make("gemma2, sliding window", 4).requires_grad_(False)
    with torch.no_grad():
        capped.lm_head.weight.mul_(100)  # beyond the cap of the logits
    documents = [Document(torch.arange(60) % V)]
    with pytest.raises(ValueError, match=r"^target: expected a model whose logits are the product"):
        HeadTraining(capped, documents, documents, tmp_path, SMALL)
    with pytest.raises(ValueError, match=r"^target: expected at least 3 layers, .* given 2"):
        HeadTraining(make("llama", 2), documents, documents, tmp_path, SMALL)
    with pytest.raises(ValueError, match=r"^texts: expected at least 48 tokens, given 10"):
        HeadTraining(make("llama", 4), [Document(torch.arange(10))], documents, tmp_path, SMALL)


def test_rows_are_the_same_whenever_they_are_asked_for() -> None:
    documents = [Document(torch.arange(100 * i, 100 * i + 7 + i), 3) for i in range(6)]
    stream = Stream(documents, 5, seed=3)
    whole = stream.rows(0, 40)
    fresh = Stream(documents, 5, seed=3)
    part = fresh.rows(13, 9)
    assert torch.equal(part.tokens, whole.tokens[13:22])
    assert torch.equal(part.learnt, whole.learnt[13:22])
    # The position of a token in its document decides whether it is learnt.
    assert torch.equal(whole.learnt, whole.tokens % 100 >= 3)


def test_the_draft_vocabulary_has_what_is_frequent_and_then_the_lowest() -> None:
    documents = [Document(torch.tensor([9, 9, 9, 7, 7, 4]))]
    assert frequent(documents, 2, 12).tolist() == [7, 9]
    assert frequent(documents, 5, 12).tolist() == [0, 1, 4, 7, 9]


LINES = (
    {"question": "How many legs have 3 cows?"},
    {"question": "2 + 2?", "answer": "4"},
    {"messages": [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}]},
    {"messages": [{"role": "user", "content": "5 + 5?"}]},
    {"text": "All of it."},
)


def test_texts_become_tokens_and_questions_are_answered_once(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in LINES))
    plain = tmp_path / "plain.txt"
    plain.write_text("A line.\n\nAnother.")
    texts = read_texts([file, plain])
    level, tokenizer = load(tiny.path("target")), tiny.tokenizer()
    asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "seed": 0}
    kept = tmp_path / "answers.jsonl"
    found = documents_of(texts, tokenizer, level.model, kept, **asked)
    assert len(found) == 6
    for document, line in zip(found, LINES[:2], strict=False):
        prompt = tiny.prompt_ids([line["question"]])[0]
        assert document.ids[: document.begin].tolist() == prompt
    assert tokenizer.decode(found[1].ids[found[1].begin :]) == "4" + tokenizer.eos_token
    plain_text = ps.Chain([level]).generate(tiny.prompt_ids([LINES[0]["question"]]), 12)
    assert torch.equal(found[0].ids, plain_text.sequences[0])
    assert found[4].begin == found[5].begin == 0
    # The answers are kept, but for a line that was not written to its end.
    again = documents_of(texts, tokenizer, None, kept, **asked)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(found, again, strict=True))
    kept.write_text(kept.read_text()[:-5])
    again = documents_of(texts, tokenizer, level.model, kept, **asked)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(found, again, strict=True))


def test_some_texts_are_held_out_and_none_of_these_is_learnt() -> None:
    documents = [Document(torch.arange(i, i + 50), 5) for i in range(100)]
    learnt, held_out = split(documents, 20)
    assert (len(learnt), len(held_out)) == (95, 5)
    assert all(len(one.ids) == 25 for one in held_out)
    assert not {int(one.ids[0]) for one in learnt} & {int(one.ids[0]) for one in held_out}
    with pytest.raises(ValueError, match=r"^texts: expected at least 2"):
        split(documents[:1], 20)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_command_trains_a_head_for_the_shipped_target(kind, tmp_path, capsys) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in LINES))
    words = [kind, "--target", str(tiny.path("target")), "--texts", str(file)]
    words += ["--output", str(tmp_path / "head"), "--max-new-tokens", "30", "--temperature", "0"]
    words += ["--length", "16", "--block", "4"]
    words += ["--draft-vocab", "64", "--inner", "32"] if kind == "eagle3" else []
    assert run_command(make_parser(), [*words, "--tokens", "64"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["overlap"]) == 3
    assert report["tokens_read"] == 64
    assert run_command(make_parser(), [*words, "--tokens", "128"]) == 2
    assert "--resume: expected --resume" in capsys.readouterr().err
    assert run_command(make_parser(), [*words, "--tokens", "128", "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_read"] == 128
    target = load(tiny.path("target"))
    if kind == "eagle3":
        assert ps.Eagle.from_pretrained(tmp_path / "head", target).config.version == 3
    else:
        ps.MTP.from_pretrained(tmp_path / "head", target)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected a JSON object a line"),
        ('{"prompt": "x"}', 'expected an object with "messages"'),
        ('{"messages": [{"role": 1}]}', 'expected an object with "messages"'),
        ("", "expected texts or prompts, given none"),
    ],
)
def test_what_is_no_text_is_named(line, message, tmp_path, capsys) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(line + "\n")
    words = ["eagle3", "--target", str(tiny.path("target")), "--output", str(tmp_path)]
    assert run_command(make_parser(), [*words, "--texts", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert run_command(make_parser(), words) == 2
    assert capsys.readouterr().err.startswith("error: --texts: expected files of texts or prompts")
