"""Models with a state that cannot be cut: logits after checkpoints, and chains of them."""

import copy
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import V, model_of

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal
from polyspec_ext.levels import InputBlock, PromptBatch, RowCounts
from polyspec_ext.levels.probe import relative_difference
from polyspec_ext.levels.products import RowProduct
from polyspec_ext.levels.stateful import StatefulLevel, recorded
from polyspec_ext.quantization.weights import weights_of as weights_of_copy

# A convolution alone, two delta rules, a scan, two that read token by token, of which one keeps its
# state in its modules, an index of keys.
STEPWISE = ("jamba", "recurrent_gemma")
KINDS = ("lfm2", "qwen3_next", "kimi_linear", "mamba2", *STEPWISE, "deepseek_v32")


def made(family: str, **options: Any) -> StatefulLevel:
    model = model_of(family)
    if model is None:
        pytest.skip("not in this release of transformers")
    return StatefulLevel(model, **options)


@torch.inference_mode()
def law(model: Any, text: list[int]) -> torch.Tensor:
    """Return logits after each token, by one pass without a cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(("checkpoints", "advance"), [(1, True), (8, True), (8, False)])
def test_logits_behind_any_rollbacks(family: str, checkpoints: int, advance: bool) -> None:
    level = made(family, checkpoints=checkpoints, advance=advance)
    assert level.stepwise == (family in STEPWISE)
    assert level.advances == (advance and family not in STEPWISE)
    replayed = []

    @given(st.randoms(use_true_random=False))
    @settings(max_examples=8, deadline=None, derandomize=True)
    def run(dice: Any) -> None:
        texts: list[list[int]] = [
            [dice.randrange(V) for _ in range(dice.randint(0, 6))] for _ in range(3)
        ]
        width = max(map(len, texts))
        padded = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        level.prefill(PromptBatch(padded.view(3, width).long(), [len(text) for text in texts]))
        cached = [len(text) for text in texts]
        for _ in range(6):
            new = [[dice.randrange(V) for _ in range(dice.randint(0, 4))] for _ in texts]
            rows = [text[n:] + more for text, n, more in zip(texts, cached, new, strict=True)]
            width = max(map(len, rows))
            if not width:
                continue
            keep = max(map(len, new)) or 1
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            first = [len(row) - len(more) for row, more in zip(rows, new, strict=True)]
            counts = RowCounts(list(map(len, rows)))
            out = level.forward(InputBlock(ids, keep, counts, RowCounts(first))).logits
            before = level.num_replayed
            for b, more in enumerate(new):
                texts[b] += more
                wanted = law(level.model, texts[b])[len(texts[b]) - len(more) :] if more else []
                for got, right in zip(out[b], wanted, strict=False):
                    assert relative_difference(got, right) < 0.01
            for text in texts:
                del text[max(0, len(text) - dice.randint(0, 5)) :]
            lengths = [len(text) for text in texts]
            cached = list(level.rollback(lengths))
            assert all(a <= b for a, b in zip(cached, lengths, strict=True))
            replayed.append(level.num_replayed - before)

    run()
    assert (level.num_advanced > 0) == level.advances
    assert (sum(replayed) > 0) == (not level.advances or checkpoints == 1)


@pytest.mark.parametrize("advance", [True, False])
@pytest.mark.parametrize("family", KINDS)
def test_hidden_states_are_those_of_one_pass(family: str, advance: bool) -> None:
    level, layers = made(family, advance=advance), (0, 1, -1)
    texts = [[5, 17, 80, 3, 3, 41, 9, 11, 2, 7], [9, 30, 31]]
    whole = []
    for text in texts:
        ids = torch.tensor([text])
        with torch.inference_mode():
            states = level.model(input_ids=ids, output_hidden_states=True).hidden_states
        if family == "mamba2":  # it leaves out the embeddings
            states = (level.model.get_input_embeddings()(ids), *states)
        whole.append(states)

    def require(hidden: Any, row: int, at: int, begin: int, count: int) -> None:
        for layer in layers:
            wanted = whole[row][layer][0, begin : begin + count]
            torch.testing.assert_close(hidden[layer][at, :count], wanted, rtol=1e-3, atol=1e-3)

    prompts = torch.tensor([texts[0][:6], [*texts[1][:1], *[0] * 5]])
    hidden = level.prefill(PromptBatch(prompts, [6, 1], 64, layers))
    require(hidden, 0, 0, 0, 6)
    require(hidden, 1, 1, 0, 1)
    for _ in range(2):
        kept = level.rollback([6, 1])
        rows = [text[n:] for text, n in zip(texts, kept, strict=True)]
        ids = torch.tensor([row + [0] * (len(rows[0]) - len(row)) for row in rows])
        counts = RowCounts(list(map(len, rows)))
        out = level.forward(InputBlock(ids, 1, counts, counts.less(1), hidden_layers=layers))
        for row, length in enumerate(kept):
            require(out.hidden, row, row, length, len(rows[row]))
    assert level.num_replayed == 0
    kept = level.rollback([7, 2])
    assert list(kept) == ([7, 2] if level.stepwise or level.advances else [6, 1])
    rows = [text[n:] for text, n in zip(texts, kept, strict=True)]
    ids = torch.tensor([row + [0] * (len(rows[0]) - len(row)) for row in rows])
    counts = RowCounts(list(map(len, rows)))
    out = level.forward(InputBlock(ids, 1, counts, counts.less(1), hidden_layers=layers))
    require(out.hidden, 0, 0, kept[0], len(rows[0]))
    skipped = [0, 0] if out.skipped is None else out.skipped.tolist()
    assert skipped == [7 - kept[0], 2 - kept[1]]
    with pytest.raises(ValueError, match="hidden_layers: expected -1 to 2, given"):
        level.forward(InputBlock(ids, 1, hidden_layers=(3,)))
    sequence = level.open(16)
    pieces = [level.extend(sequence, torch.tensor([texts[0][a : a + 5]]), layers) for a in (0, 5)]
    for begin, piece in zip((0, 5), pieces, strict=True):
        require(piece, 0, 0, begin, 5)


def levels_of(family: str, count: int, **options: Any) -> list[StatefulLevel]:
    """A model and others that are a little off."""
    levels = []
    for seed in range(count):
        model = model_of(family)
        if model is None:
            pytest.skip("not in this release of transformers")
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters() if seed else ():
                weight += 0.03 * torch.randn_like(weight)
        levels.append(StatefulLevel(model, **options))
    return levels


class Coin:
    """Proposes a known text, in which each token is another with the chance .3."""

    def __init__(self, text: list[int]) -> None:
        self.text, self.random = text, random.Random(0)

    def propose(self, context: Context, k: int) -> Proposal:
        at = len(context.tokens)
        return Proposal([(t + (self.random.random() < 0.3)) % V for t in self.text[at : at + k]])


@pytest.mark.parametrize(
    ("window", "again", "before"), [(2, 1.25, 0.01), (4, 3.08, 0.07), (12, 6.43, 0.31)]
)
def test_tokens_are_read_again_beside_the_next(window: int, again: float, before: float) -> None:
    """Within the passes of verifications, and in passes before them where they are many."""
    level = made("lfm2", advance=False)
    level.max_length = None
    text = ps.Chain([level]).generate([5, 17, 80], 400, eos_token_id=[]).sequences[0].tolist()
    passes: list[int] = []
    run = level.model.forward
    level.model.forward = lambda *args, **options: (passes.append(1), run(*args, **options))[1]
    chain = ps.Chain([level, Coin(text + [0] * window)], [window])
    out = chain.generate([5, 17, 80], 400, eos_token_id=[])
    assert out.sequences[0].tolist() == text
    count = out.stats.levels[0].num_verifications
    assert level.num_replayed / count == pytest.approx(again, rel=0.01)
    assert (len(passes) - 1) / count - 1 == pytest.approx(before, abs=0.01)
    assert made("lfm2").capabilities.replays == 0


def test_requests_that_join_have_the_text_that_they_have_alone() -> None:
    levels = levels_of("lfm2", 2)
    chain = ps.Chain(levels, [3])
    prompts = [[5, 17, 80], [9, 4], list(range(40, 90)), [7]]
    alone = [
        chain.generate(prompt, 10, 0.9, seed=seed, eos_token_id=[]).sequences[0].tolist()
        for seed, prompt in enumerate(prompts)
    ]
    server = ps.Server(chain, 2)
    texts: dict[int, list[int]] = {}
    for seed, prompt in enumerate(prompts):
        texts[server.add(prompt, 10, temperature=0.9, seed=seed, eos_token_id=[])] = list(prompt)
    again = server.add(
        prompts[2], 10, temperature=0.9, seed=2, eos_token_id=[]
    )  # its prompt was read before
    texts[again] = list(prompts[2])
    while server.running or server.waiting:
        for event in server.step():
            assert event.error is None
            texts[event.request] += event.tokens
    assert list(texts.values()) == [*alone, alone[2]]


def test_another_answer_to_the_same_prompt_goes_on_behind_it() -> None:
    chain = ps.Chain(levels_of("qwen3_next", 2), [3])
    fresh = ps.Chain(levels_of("qwen3_next", 2), [3])
    prompt = list(range(40, 60))
    texts = {0: prompt, 19: [*prompt, 1, 2], 21: [*prompt, 1, 3]}
    for cached, text in texts.items():
        stream = chain.stream(text, 40, eos_token_id=[], cache_prompt=True)
        wanted = fresh.generate(text, 40, eos_token_id=[]).sequences[0].tolist()
        assert [*text, *stream] == wanted
        assert stream.stats.num_cached_tokens == cached


@pytest.mark.parametrize(("cache_tokens", "wanted"), [(0, False), (1024, True)])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_a_server_keeps_the_states_of_prompts_and_answers(family, cache_tokens, wanted) -> None:
    levels = [*levels_of(family, 2), ps.Level(model_of("llama"))]
    server = ps.Server(ps.Chain(levels, [4, 2]), 2, cache_tokens=cache_tokens)
    alone = ps.Chain(levels_of(family, 1))

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        text, cached = list(prompt), 0
        server.add(prompt, 12, eos_token_id=[])
        while server.running or server.waiting:
            for event in server.step():
                assert event.error is None
                text += event.tokens
                cached = event.stats.num_cached_tokens if event.stats else cached
        assert text == alone.generate(prompt, 12, eos_token_id=[]).sequences[0].tolist()
        return text, cached

    prompt = list(range(40, 75))
    first, _ = ask(prompt)
    cached = [ask([*first, 3, 9])[1]]
    cached += [ask([*prompt, *tail])[1] for tail in ([], [8], [9, 7], [4, 4])]
    if wanted:
        assert len(first) - 5 <= cached[0] <= len(first)
        assert cached[1:] == [34, 34, 35, 35]  # the third has read all of the prompt
    else:
        assert cached == [0] * 5


@pytest.mark.parametrize("asked", [1, 30])
def test_a_level_that_a_call_does_not_ask_keeps_nothing_of_it(asked: int) -> None:
    """Ask for one token, which no drafter is asked for: it has no state, or another text's."""
    model = model_of("mamba2")
    levels = [StatefulLevel(model), StatefulLevel(copy.deepcopy(model))]
    chain = ps.Chain(levels, [4], check_vocabulary=False)

    def ask(text: list[int], count: int) -> Any:
        batch = chain.batch([text], count, eos_token_id=[], cache_prompt=True)
        batch.complete()
        return batch.stats

    one, other = list(range(20)), list(range(20, 40))
    ask(one, asked)
    ask(other, 1)
    assert ask(other, 30).levels[0].mean_acceptance_length == 5


@pytest.mark.parametrize("family", ["inkling2_loop_text", "qwen3_next"])
def test_states_begin_again_whatever_layers_the_cache_had(family: str) -> None:
    """A model may append layers to its cache in its first pass."""
    level = made(family)
    ids = torch.randint(0, V, (1, 12))
    level.prefill(PromptBatch(ids))
    saved = level.save(0, 0, 12)
    wanted = level.forward(InputBlock(ids[:, :3], 3)).logits
    level.rollback([0])
    level.read(ids, [12])
    assert torch.equal(level.forward(InputBlock(ids[:, :3], 3)).logits, wanted)
    sequence = level.open(20)
    level.restore(sequence, saved, 12)
    level.admit([sequence], [12], 20, None)
    assert torch.equal(level.forward(InputBlock(ids[:, :3], 3)).logits, wanted)


def test_a_folder(tmp_path: Path) -> None:
    model = model_of("lfm2")
    model.save_pretrained(tmp_path)
    options: dict[str, Any] = {"eos_token_id": []}
    texts = [
        ps.Chain([place, ps.PromptLookup()], [3], dtype="float32", pack="auto").generate(
            [5, 17, 5, 17], 8, **options
        )
        for place in (str(tmp_path), model)
    ]
    assert texts[0].sequences.equal(texts[1].sequences)
    with pytest.raises(ValueError, match="given StatefulLevel"):
        ps.Chain([str(tmp_path), "w4"], [3])


PACKED = [
    "lfm2", "bamba", "granitemoehybrid", "jamba", "kimi_linear", "qwen3_next", "nemotron_h",
    "mamba2", "recurrent_gemma", "zamba",
]  # fmt: skip


@pytest.mark.parametrize("family", PACKED)
def test_packed_levels(family: str) -> None:
    level = made(family, pack=True)
    runs = list(level._runs.modules())
    assert not any(type(module) is torch.nn.Linear for module in runs)
    text = [5, 17, 80, 3, 3, 41, 9, 12, 33]
    level.prefill(PromptBatch(torch.tensor([text[:3]])))
    level.forward(InputBlock(torch.tensor([[1, 2, 3]]), 1))
    level.rollback([3])
    begin = level._rows[0].length
    logits = level.forward(InputBlock(torch.tensor([text[begin:]]), 6)).logits[0]
    whole = law(level.model, text)[3:]
    assert max(map(relative_difference, logits, whole)) < 1e-3
    rows = torch.randn(5, level.hidden_size)
    for module in runs:
        if isinstance(module, RowProduct) and module.in_features == level.hidden_size:
            assert module(rows[2:3]).equal(module(rows)[2:3])


@pytest.mark.filterwarnings("ignore:.*expected no more parameters")
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "bamba"])
def test_copies_of_4_bits_draft_and_verify(family: str, place: int, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    places: list[Any] = [model_of("llama"), model_of("llama"), model_of("llama")]
    places[place] = f"w4:{tmp_path}"
    chain = ps.Chain(places, [4, 2], check_vocabulary=False)
    options: dict[str, Any] = {"eos_token_id": [], "pad_token_id": 0}
    prompts = [[5, 17, 80, 3, 3, 41], [9]]
    wanted = ps.Chain(places[:1]).generate(prompts, 12, **options)
    assert chain.generate(prompts, 12, **options).sequences.equal(wanted.sequences)
    part: Any = chain.engine.parts[place]
    level = getattr(part, "level", part)
    assert isinstance(level, StatefulLevel)
    rounded = copy.deepcopy(model)
    count = 0
    for name, weights in weights_of_copy(level.model):
        groups = weights.values.float().unflatten(1, (-1, weights.group)) - 8
        plain = groups * weights.scales[..., None] + weights.zeros[..., None]
        rounded.get_submodule(name).weight.data = plain.flatten(1)
        count += 1
    assert count > 8
    text = [5, 17, 80, 3, 3, 41, 9, 12, 33]
    level.prefill(PromptBatch(torch.tensor([text[:1]])))
    logits = level.forward(InputBlock(torch.tensor([text[1:]]), 8)).logits[0]
    assert max(map(relative_difference, logits, law(rounded, text)[1:])) < 0.1
    small = ps.Chain([places[0], f"trim:40:{tmp_path}"], [3], check_vocabulary=False)
    assert small.generate(prompts, 12, **options).sequences.equal(wanted.sequences)


def test_states_in_modules_are_the_levels() -> None:
    """Passes of a level leave nothing in the modules of the model that the user has."""
    level = made("recurrent_gemma")
    level.prefill(PromptBatch(torch.tensor([[5, 17, 80]])))
    for kept in (level.model, level._runs):
        states = [m.conv1d_state for m in kept.modules() if hasattr(m, "conv1d_state")]
        assert len(states) == 1
        assert (states[0] is None) == (kept is level.model)


def test_copies_packed_levels_and_refusals() -> None:
    level = made("lfm2", name="mine", pack=True)
    again = copy.deepcopy(level)
    assert (again.name, again.pack) == ("mine", True)
    texts = [
        ps.Chain([one, ps.PromptLookup()], [3]).generate([5, 17, 5, 17], 8, eos_token_id=[])
        for one in (level, again)
    ]
    assert texts[0].sequences.equal(texts[1].sequences)
    with pytest.raises(ValueError, match=r"small: .*nothing but their weights.*without quantised"):
        StatefulLevel(ps.quantize_w4(model_of("mamba2"), 32), name="small")
    with pytest.raises(ValueError, match="mine: expected no tree"):
        level.forward(InputBlock(torch.tensor([[1]]), 1, parents=torch.tensor([[-1]])))
    with pytest.raises(ValueError, match="checkpoints: expected"):
        made("lfm2", checkpoints=0)
    with pytest.raises(ValueError, match="or a StatefulLevel"):
        ps.HuggingFaceLevel(level.model)


def test_a_configuration_that_transformers_makes_no_cache_of() -> None:
    model = model_of("llama")
    model.config.layer_types = ["mine", "mine"]
    level = ps.Level(model, new_cache=lambda rows: hf.DynamicCache())
    assert isinstance(level, ps.HuggingFaceLevel)


def test_a_state_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a mistake: the state keeps rejected tokens."""
    model = model_of("lfm2")
    monkeypatch.setattr("polyspec_ext.levels.stateful._copied", lambda values, *rest: dict(values))
    with pytest.raises(ValueError, match="does not: a relative difference"):
        StatefulLevel(model)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2"])
def test_functions_that_do_not_advance_a_state_are_found(family, monkeypatch) -> None:
    """Plant a mistake: the state before a pass stays. Then tokens are read again."""
    assert made(family).advances
    monkeypatch.setattr(
        "polyspec_ext.levels.stateful.Call.state", lambda call, count, before: before
    )
    assert not made(family).advances


def test_functions_are_watched_in_passes_of_levels_alone() -> None:
    level, model = made("qwen3_next"), model_of("qwen3_next")
    text = torch.tensor([[5, 17, 80, 3]])
    module = sys.modules[type(model).__module__]
    function = module.torch_chunk_gated_delta_rule
    StatefulLevel(model)
    assert module.torch_chunk_gated_delta_rule is function
    found: list[torch.Tensor] = []

    def beside() -> None:
        found.append(law(model, [5, 17, 80, 3]))

    with recorded() as calls:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join(60)
        assert not calls
        law(level.model, [5, 17, 80, 3])
    assert len(calls) == 1
    assert calls[0].arguments["key"].shape[1] == text.shape[1]
    law(level.model, [5, 17, 80, 3])
    assert len(calls) == 1
    assert found[0].equal(law(model, [5, 17, 80, 3]))
