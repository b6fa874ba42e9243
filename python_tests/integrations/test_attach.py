"""`ps.attach`: `model.generate` and its callers run a chain, without a change of the call."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TextIteratorStreamer,
    pipeline,
)

import polyspec_ext as ps
from polyspec_ext import tiny

OPTIONS = {"max_new_tokens": 24, "do_sample": False}
QUESTION = "Tom has 3 bags of 8 apples. How many in all?"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny.path("target"))


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.path("target"), dtype="float32").eval()


@pytest.fixture(scope="module")
def chain(model: Any) -> ps.Chain:
    return ps.Chain([model, tiny.path("drafter")], [3])


@pytest.fixture(autouse=True)
def as_it_was(model: Any) -> Any:
    yield
    assert "generate" not in vars(model)


@pytest.fixture
def inputs(tokenizer: Any) -> dict[str, Any]:
    return dict(tokenizer(QUESTION, return_tensors="pt", return_token_type_ids=False))


def verified(chain: ps.Chain, call: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of `call`, and how many batches of the chain it took."""
    begun = chain.batch
    calls = []

    def batch(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return begun(*args, **options)

    chain.batch = batch
    try:
        return call(), len(calls)
    finally:
        del chain.batch


def test_generate(model: Any, chain: ps.Chain, inputs: dict[str, Any], tokenizer: Any) -> None:
    wanted = model.generate(**inputs, **OPTIONS)
    with ps.attach(model, chain):
        out, calls = verified(chain, lambda: model.generate(**inputs, **OPTIONS))
        assert torch.equal(out, wanted)
        assert calls == 1
        out = model.generate(inputs["input_ids"], **OPTIONS, return_dict_in_generate=True, seed=3)
        assert torch.equal(out.sequences, wanted)
        assert out.stats.levels[0].num_draft_tokens > 0
        loop = {"custom_generate": lambda model, input_ids, **_: input_ids}
        assert torch.equal(model.generate(**inputs, **loop), inputs["input_ids"])
        stops = {"stop_strings": ["8"], "tokenizer": tokenizer, "max_new_tokens": 40}
        stopped = model.generate(**inputs, do_sample=False, **stops)
        with pytest.raises(ValueError, match="num_beams: expected its default with a chain"):
            model.generate(**inputs, num_beams=2)
        with pytest.raises(ValueError, match="assistant_model: expected none beside a chain"):
            model.generate(**inputs, assistant_model=model)
        del stops["tokenizer"]  # the tokenizer next to the weights
        assert torch.equal(model.generate(**inputs, do_sample=False, **stops), stopped)
    stops["tokenizer"] = tokenizer
    assert torch.equal(model.generate(**inputs, do_sample=False, **stops), stopped)
    assert verified(chain, lambda: model.generate(**inputs, **OPTIONS))[1] == 0


@pytest.mark.parametrize("owner", ["model", "call", "positional"])
def test_stop_strings_of_the_configuration(model, chain, inputs, tokenizer, owner) -> None:
    """As the plain model: `generate` itself keeps its tokenizer from a custom loop."""
    before = copy.deepcopy(model.generation_config)
    args, options = (inputs["input_ids"],), {"tokenizer": tokenizer, **OPTIONS}
    config = model.generation_config
    if owner != "model":
        config = GenerationConfig(**OPTIONS)
        options = {"tokenizer": tokenizer, "generation_config": config}
    if owner == "positional":
        args, options = (*args, config), {"tokenizer": tokenizer}
    config.stop_strings = ["8"]
    try:
        wanted = model.generate(*args, **options)
        with ps.attach(model, chain):
            out, calls = verified(chain, lambda: model.generate(*args, **options))
        assert config.stop_strings == ["8"]
    finally:
        model.generation_config = before
    assert torch.equal(out, wanted)
    assert calls == 1
    assert out.shape[1] < model.generate(**inputs, **OPTIONS).shape[1]


def test_a_pipeline(model: Any, chain: ps.Chain, tokenizer: Any) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chat = [{"role": "user", "content": QUESTION}]
    for prompt, more in (
        (QUESTION, {}),
        (chat, {}),
        ([QUESTION, "2 + 2 ="], {"stop_sequence": "8"}),
    ):
        wanted = generator(prompt, **OPTIONS, **more)
        with ps.attach(model, chain):
            for one in (generator, pipeline("text-generation", model=model, tokenizer=tokenizer)):
                out, calls = verified(chain, lambda: one(prompt, **OPTIONS, **more))  # noqa: B023
                assert out == wanted
                assert calls == (2 if more else 1)


@pytest.mark.parametrize("how", ["attached", "attached, by position", "custom_generate"])
def test_a_streamer_in_a_thread(how, model, chain, inputs, tokenizer) -> None:
    """`generate` keeps its streamer from a custom loop; the reader would wait for ever."""
    wanted = tokenizer.decode(model.generate(**inputs, **OPTIONS)[0], skip_special_tokens=True)
    streamer = TextIteratorStreamer(tokenizer, timeout=60, skip_special_tokens=True)
    options = {**inputs, **OPTIONS, "streamer": streamer}
    args: tuple[Any, ...] = ()
    if how == "custom_generate":
        options |= {"custom_generate": ps.custom_generate, "chain": chain}
    else:
        ps.attach(model, chain)
    if "position" in how:
        options.pop("streamer")
        args = (options.pop("input_ids"), None, None, None, None, None, None, streamer)
    thread = threading.Thread(target=model.generate, args=args, kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == wanted
    if how != "custom_generate":
        ps.detach(model)


def test_a_streamer_ends_with_an_error(model, chain, inputs, tokenizer) -> None:
    loop = {"custom_generate": ps.custom_generate, "chain": chain, "num_beams": 1}
    for more in (loop, {}):
        streamer = TextIteratorStreamer(tokenizer, timeout=60, skip_prompt=True)
        with ps.attach(model, chain), pytest.raises(ValueError, match="penalty_alpha"):
            model.generate(**inputs, **more, penalty_alpha=0.5, top_k=4, streamer=streamer)
        assert "".join(streamer) == ""


def test_nested_and_interrupted(model: Any, chain: ps.Chain, inputs: dict[str, Any]) -> None:
    alone = ps.Chain([model])
    run = lambda: model.generate(**inputs, **OPTIONS)  # noqa: E731

    def interrupt() -> None:
        assert (verified(alone, run)[1], verified(chain, run)[1]) == (1, 0)
        raise KeyboardInterrupt

    with ps.attach(model, chain) as outer:
        assert outer.chain is chain
        with pytest.raises(KeyboardInterrupt), ps.attach(model, alone):
            interrupt()
        assert (verified(alone, run)[1], verified(chain, run)[1]) == (0, 1)
        inner = ps.attach(model, alone)
        outer.detach()
        assert (verified(alone, run)[1], verified(chain, run)[1]) == (1, 0)
        inner.detach()
    with pytest.raises(ValueError, match="model: expected one with an attached chain"):
        ps.detach(model)
    model.generate = mine = lambda **_: "mine"
    ps.attach(model, chain)
    ps.detach(model)
    assert model.generate is mine
    del model.generate


def test_of_another_model(model: Any, chain: ps.Chain, inputs: dict[str, Any]) -> None:
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"chain: expected .*the very model"):
        ps.attach(other, chain)
    with pytest.raises(TypeError, match=r"chain: expected a polyspec_ext.Chain"):
        ps.attach(model, [model])
    with ps.attach(model, chain):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.get_output_embeddings().weight.zero_()
        out, calls = verified(chain, lambda: copied.generate(**inputs, max_new_tokens=1))
    assert (int(out[0, -1]), calls) == (0, 0)


def test_an_encoder_decoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    config.decoder_start_token_id, config.eos_token_id = 0, None
    model = T5ForConditionalGeneration(config).eval()
    chain = ps.Chain([model, copy.deepcopy(model)], [3])
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = model.generate(ids, **OPTIONS)
    with ps.attach(model, chain):
        for out in (model.generate(ids, **OPTIONS), model.generate(input_ids=ids, **OPTIONS)):
            assert torch.equal(out, wanted)
    ps.attach(model, chain).detach()
