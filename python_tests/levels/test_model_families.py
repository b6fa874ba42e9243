"""Families that a level serves, as docs/models.md says: greedy texts of each, or a refusal."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from model_families import (
    AS_IN_TABLE,
    OTHERWISE_BEFORE,
    TABLE,
    V,
    Verdict,
    model_of,
)

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal
from polyspec_ext.levels.models import is_encoder_decoder
from polyspec_ext.levels.probe import switch_of
from polyspec_ext.levels.stateful import StatefulLevel

PROMPTS = [[5, 17, 80, 3, 3, 41], [9], [30, 31, 32]]
LENGTHS = [14, 9, 12]
CASES = [pytest.param(v, name, id=name) for v in TABLE for name in v.names]


class Scripted:
    """Proposes known texts, but for every third token, which is another."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def fork(self) -> Any:
        return self

    def propose(self, context: Context, k: int) -> Proposal:
        at = len(context.tokens)
        text = next(t for t in self.texts if t[:at] == context.tokens)
        return Proposal([(t + (i % 3 == 0)) % V for i, t in enumerate(text)][at : at + k])


ADVANCING = (5, 24)  # releases of transformers that can cut all caches after a pass
ENCODED = [7, 31, 2, 60, 12]


def encoded_of(model: Any) -> dict[str, Any]:
    """Return the input of the chain's encoders, if any."""
    return {"encoder_input_ids": ENCODED} if is_encoder_decoder(model) else {}


@torch.no_grad()
def require_greedy(model: Any, text: list[int], prompt: list[int], count: int) -> int:
    """Require greedy text without a cache; return in how many tokens a tie went otherwise."""
    assert text[: len(prompt)] == prompt
    assert len(text) == len(prompt) + count
    inputs = {"input_ids": torch.tensor([text[:-1]])}
    if encoded_of(model):
        inputs = {
            "input_ids": torch.tensor([ENCODED]), "decoder_input_ids": inputs["input_ids"]
        }  # fmt: skip
    logits = model(**inputs, use_cache=False).logits[0]
    ties = 0
    for row, token in zip(logits[len(prompt) - 1 :], text[len(prompt) :], strict=True):
        if int(row.argmax()) != token:
            gap = float(row.max() - row[token])
            assert gap < 1e-4 * float(row.std()), f"token {token}, {gap} below the largest logit"
            ties += 1
    if ties:
        warnings.warn(f"{ties} ties", stacklevel=2)
    return ties


def require_greedy_chains(model: Any, levels: list[Any], count: int) -> None:
    """Chains over `count` prompts: with the model as drafter, and with one often wrong."""
    prompts, lengths = PROMPTS[:count], LENGTHS[:count]
    own = ps.Chain(levels, [3])
    options: dict[str, Any] = {"eos_token_id": [], "pad_token_id": 0, **encoded_of(model)}
    out = own.generate(prompts, lengths, **options)

    def texts(rows: list[list[int]]) -> list[list[int]]:
        return [row[: len(p) + n] for row, p, n in zip(rows, prompts, lengths, strict=True)]

    expected = texts(out.sequences.tolist())
    new = [text[len(p) :] for text, p in zip(expected, prompts, strict=True)]
    assert max(len(set(tokens)) for tokens in new) > 1  # a constant text would hide errors
    ties = sum(
        require_greedy(model, text, p, n)
        for text, p, n in zip(expected, prompts, lengths, strict=True)
    )
    stats = out.stats.levels[0]
    assert stats.num_draft_tokens > 0
    if not ties:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    chain = ps.Chain([levels[0], Scripted(expected)], [4])
    out = chain.generate(prompts, lengths, **options)
    stats = out.stats.levels[0]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for text, other, p, n in zip(
        texts(out.sequences.tolist()), expected, prompts, lengths, strict=True
    ):
        if text != other:
            assert require_greedy(model, text, p, n) > 0


@pytest.mark.parametrize(("verdict", "family"), CASES)
def test_family(verdict: Verdict, family: str) -> None:
    model = model_of(family)
    if model is None:
        pytest.skip("not in this release of transformers")
    if family in OTHERWISE_BEFORE and release() < AS_IN_TABLE:
        try:
            level = ps.Level(model)
        except ValueError:
            return
        require_greedy_chains(model, [level, ps.Level(model)], 3 if level.supports_batches else 1)
        return
    if verdict.served == "refused":
        with pytest.raises(ValueError, match=verdict.message) as error:
            ps.Chain([model, ps.PromptLookup()], [2])
        assert type(model).__name__ in str(error.value)
        return
    levels = [ps.Level(model), ps.Level(model)]
    assert levels[0].supports_batches == (verdict.served == "batches")
    assert verdict.why or not isinstance(levels[0], StatefulLevel)  # which costs a pass a row
    require_greedy_chains(model, levels, 1)
    if verdict.served == "batches":
        require_greedy_chains(model, levels, 3)
        if isinstance(levels[0], StatefulLevel) and release() >= ADVANCING:
            advances = "advance" in verdict.why
            assert levels[0].advances == advances
            assert bool(levels[0].num_advanced) == advances
            assert bool(levels[0].num_replayed) == (not advances and not levels[0].stepwise)
    else:
        with pytest.raises(ValueError, match=rf"expected one prompt, given 2; .*{verdict.message}"):
            ps.Chain(levels, [2]).generate(PROMPTS[:2], 4, **encoded_of(model))


def release() -> tuple[int, ...]:
    return tuple(int(part) for part in hf.__version__.split(".")[:2])


# ---- the probe -----------------------------------------------------------------------------------


def llama(**options: Any) -> Any:
    model = model_of("llama")
    for name, value in options.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize("quantised", [False, True])
def test_a_model_that_places_tokens_by_itself_takes_one_prompt(quantised, monkeypatch) -> None:
    model = ps.quantize_w4(llama(), 32) if quantised else llama()
    forward = model.forward

    def deaf(input_ids, position_ids=None, logits_to_keep=0, **others) -> Any:
        return forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **others)

    monkeypatch.setattr(model, "forward", deaf)
    level = ps.Level(model)
    assert not level.supports_batches
    with pytest.raises(
        ValueError, match="expected one prompt, given 2; LlamaForCausalLM gives rows of different"
    ):
        ps.Chain([level, ps.PromptLookup()], [2]).generate([[1, 2], [3]], 4)
    with pytest.raises(ValueError, match=r"a batch of 2: LlamaForCausalLM gives rows of different"):
        level.prefill(torch.tensor([[1, 2], [3, 4]]))
    # A window's cache needs masks and positions for one prompt, too.
    with pytest.raises(ValueError, match="given one at a time: LlamaForCausalLM gives rows"):
        ps.Level(model, streaming=16)


class Stubborn(hf.DynamicCache):
    """Says that it was cut."""

    def crop(self, *_: Any, **__: Any) -> None:
        pass


def test_a_cache_that_is_not_cut_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"mine: expected passes behind a cache.*LlamaForCausalLM \(llama\) does not",
    ):
        ps.Level(llama(), name="mine", new_cache=Stubborn)
    ps.Level(llama(), name="mine", new_cache=hf.DynamicCache)


@torch.no_grad()
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_a_model_that_sees_later_tokens_is_refused(share: float) -> None:
    """Also where it hardly does, which is not taken for its rounding."""
    model = model_of("bert")
    model.config.is_decoder = False
    for layer in model.bert.encoder.layer:
        layer.attention.self.is_causal = layer.attention.self.is_decoder = False
        layer.attention.output.dense.weight.mul_(share)
    with pytest.raises(ValueError, match=r"BertLMHeadModel \(bert\) does not: a relative"):
        ps.Level(model)


def test_a_model_that_fails_behind_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    forward = model.forward

    def short(input_ids: Any, past_key_values: Any = None, **others: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length() > 0:
            raise RuntimeError("no several tokens\nhere")
        return forward(input_ids=input_ids, past_key_values=past_key_values, **others)

    monkeypatch.setattr(model, "forward", short)
    with pytest.raises(ValueError, match=r"does not: RuntimeError: no several tokens$"):
        ps.Chain([model, llama()], [2])

    def full(**_: Any) -> Any:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        ps.Level(model)


@torch.no_grad()
def test_logits_that_tell_nothing_are_taken() -> None:
    """Equal logits, and NaN, which is an error of the request."""
    for value in (0.0, float("nan")):
        model = llama()
        model.get_output_embeddings().weight.fill_(value)
        assert ps.Level(model).supports_batches
    chain = ps.Chain([model], [])
    with pytest.raises(ps.RequestError):
        chain.generate([1, 2], 4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantised", [False, True])
def test_rounding_is_no_reason(dtype: torch.dtype, quantised: bool) -> None:
    """Half precision, and activations that are quantised by the range of the whole pass."""
    model = model_of("qwen2").to(dtype)

    def coarse(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        step = given[0].abs().amax() / 127
        return (torch.round(given[0] / step) * step,)

    if quantised:
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(coarse)
    assert ps.Level(model).supports_batches


def test_a_level_is_as_new_after_its_probe() -> None:
    state = torch.get_rng_state()
    made = []

    def new_cache(rows: int) -> Any:
        made.append(ps.RollbackCache.for_model(model, rows))
        return made[-1]

    model = llama()
    state = torch.get_rng_state()
    level = ps.Level(model, new_cache=new_cache)
    assert torch.equal(torch.get_rng_state(), state)
    assert level.cache is made[0]
    assert level.cache.lengths.tolist() == [0]
    assert sorted({cache.batch_size for cache in made}) == [1, 2]


def test_contexts_of_any_length() -> None:
    """The learned positions of GPT-2 end where the context does."""
    config = model_of("gpt2").config
    for longest in (4, 13, 14, 15, 20):
        config.n_positions = longest
        level = ps.Level(hf.GPT2LMHeadModel(config).eval())
        assert level.supports_batches
        assert level.max_length == longest
    assert ps.Level(llama(max_position_embeddings=-1)).max_length is None


# ---- embeddings that change with the length of the text ------------------------------------------

HALF = {"short_factor": [1.0] * 4, "long_factor": [1.5, 4.0, 16.0, 32.0]}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 32, **HALF}
SCALES = {"short_mscale": 1.0, "long_mscale": 1.3}
SWITCHING = {
    "Phi3": (LONG, 32),
    "Phimoe": ({**LONG, **SCALES}, 32),
    "Llama": (LONG, 32),
    "Qwen2": ({"rope_type": "dynamic", "factor": 4.0}, 63),
}


def switching(family: str) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": V, "pad_token_id": 0}
    kinds = getattr(hf, f"{family}Config"), getattr(hf, f"{family}ForCausalLM")
    parameters = {"rope_theta": 10000.0, **SWITCHING[family][0]}
    own = {"original_max_position_embeddings": 32} if family.startswith("Phi") else {}
    torch.manual_seed(0)
    config = kinds[0](
        **sizes,
        max_position_embeddings=64,
        initializer_range=0.3,
        rope_parameters=parameters,
        **own,
    )
    return kinds[1](config).eval()


@torch.no_grad()
def without_cache(model: Any, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text


@pytest.mark.parametrize("family", SWITCHING)
def test_embeddings_that_switch_bound_the_context(family: str) -> None:
    """Beyond the switch, a level is refused by name, in `generate` too."""
    longest = SWITCHING[family][1]
    model = switching(family)
    draft = switching(family)
    chain = ps.Chain([model, draft], [3])
    prompt = [5, 17, 80, 3, 3, 41]
    count = longest - len(prompt)
    assert chain.levels[0].max_length == longest
    model(torch.arange(64)[None])  # a text beyond it leaves its frequencies in the model
    out = chain.generate(prompt, count, eos_token_id=[])
    assert out.sequences[0].tolist() == without_cache(model, prompt, count)
    kind = SWITCHING[family][0]["rope_type"]
    wanted = f"expected at most {longest} tokens in its context \\({kind} embeddings change"
    with pytest.raises(ValueError, match=wanted):
        chain.generate(prompt, count + 1)
    with ps.attach(model, chain), pytest.raises(ValueError, match=wanted):
        model.generate(torch.tensor([prompt]), max_new_tokens=count + 1)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 16}, 16),
        ({"rope_scaling": {"type": "su"}}, 63),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"rope_parameters": {"full": {"rope_type": "yarn"}, "sliding": LONG}}, 32),
        ({"rope_parameters": {"full": {"rope_type": "dynamic"}, "sliding": LONG}}, 32),
        ({"rope_parameters": None}, None),
        ({}, None),
    ],
)
def test_the_switch_that_a_configuration_names(config: dict[str, Any], wanted: int | None) -> None:
    """By the names of other files as well, and of each kind of layer."""
    found = switch_of(SimpleNamespace(max_position_embeddings=64, **config))
    assert (found and found[0]) == wanted
