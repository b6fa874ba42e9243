"""Checkpoints of EAGLE heads: the shipped heads draft, and wrong files are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import arguments_of
from eagle_heads import Variant, config_of, save, weights_of
from small_models import make
from unsafe_code import Code

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.drafters.words import head_of
from polyspec_ext.levels import load as load_level

FIRST = Variant("first", hidden=32, vocab=64)
THIRD = Variant("third", version=3, hidden=32, vocab=64, draft_vocab=40, own_head=True)


@pytest.fixture(scope="module")
def target() -> Any:
    return make("llama", 4, vocab=64)


def load(place: Path, target: Any) -> ps.Eagle:
    return ps.Eagle.from_pretrained(place, target)


@pytest.mark.parametrize("v", [FIRST, THIRD], ids=lambda v: v.name)
@pytest.mark.parametrize("binary", [False, True])
def test_tensors_that_do_not_fit_are_named(v, binary, target, tmp_path) -> None:
    v = Variant(**{**v.__dict__, "binary": binary})
    whole = weights_of(v, 4)
    for key in whole:
        if key == "lm_head.weight" or (key == "d2t" and v is FIRST):
            continue
        shape = list(whole[key].shape)
        rest = {name: value for name, value in whole.items() if name != key}
        shown = key.replace("midlayer.", "layers.0.")
        with pytest.raises(ValueError, match=rf"{shown}: expected .*{shape[0]}.*, given none"):
            load(save(v, rest, tmp_path / "missing"), target)
        rest[key] = torch.zeros(3, 1, dtype=whole[key].dtype)
        with pytest.raises(ValueError, match=rf"{shown}: expected shape .*, given \[3, 1\]"):
            load(save(v, rest, tmp_path / "misshapen"), target)
    with pytest.raises(ValueError, match=r"layers.7.odd: expected no tensor .* shape \[2\]"):
        load(save(v, {**whole, "layers.7.odd": torch.zeros(2)}, tmp_path / "unknown"), target)


def test_a_checkpoint_with_code_in_it_is_refused(target, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = save(FIRST, weights_of(FIRST, 4), tmp_path / "head")
    (place / "model.safetensors").unlink()
    file = place / "pytorch_model.bin"
    torch.save({**weights_of(FIRST, 4), "extra": Code()}, file)
    with pytest.raises(ValueError, match=r"pytorch_model.bin: .*tensors only.*code.*refused"):
        load(place, target)
    assert not (tmp_path / "ran").exists()
    torch.save([1, 2], file)
    with pytest.raises(ValueError, match=r"expected tensors by name, given list"):
        load(place, target)
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"pytorch_model.bin: expected"):
        load(place, target)
    file.unlink()
    with pytest.raises(ValueError, match=r"expected model.safetensors or pytorch_model.bin"):
        load(place, target)
    (place / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model.safetensors: expected a safetensors file"):
        load(place, target)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 65}, "vocab_size: expected the target's, 64, given 65"),
        ({"hidden_size": None}, "hidden_size: expected a number >= 1, given None"),
        ({"hidden_size": "x"}, "hidden_size: expected a number >= 1, given 'x'"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', given 'gelu'"),
        ({"speculators_model_type": "mlp"}, "expected 'eagle' or 'eagle3', given 'mlp'"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc or fc_norm, given both"),
        ({"norm_output": 1}, "norm_output: expected true or false, given 1"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9]}, r"\[0, 4\] of the target, given \[2, 9\]"),
        ({"num_aux_hidden_states": 4}, "expected 4 layers"),
        ({"target_hidden_size": 48}, "hidden states of 48 numbers, given one with 32"),
        ({"draft_vocab_size": 39}, r"lm_head.weight: expected shape \[39, 32\], given \[40, 32\]"),
        ({"draft_vocab_size": None}, r"lm_head.weight: expected shape \[64, 32\]"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers: expected at most"),
        ({"num_hidden_layers": 2**19}, "num_hidden_layers: expected 1, as the tensors have"),
        ({"num_hidden_layers": "x"}, "num_hidden_layers: expected a number >= 1, given 'x'"),
        ({"num_key_value_heads": -1}, "num_key_value_heads: expected a number >= 1, given -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor .*4, given 3"),
        ({"head_dim": 2**63}, "head_dim: expected at most"),
        ({"head_dim": [8]}, "head_dim: expected a number >= 1, given list"),
        ({"head_dim": 7}, "Llama's layer: .*head_dim"),
        ({"intermediate_size": 10**30}, "intermediate_size: expected at most"),
        ({"draft_vocab_size": 2**40}, "draft_vocab_size: expected at most"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: expected a number >= 1"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps: expected a number > 0, given 'x'"),
        ({"rope_theta": 0}, "rope_theta: expected a number > 0, given 0"),
        ({"rope_theta": {}}, "rope_theta: expected a number > 0, given dict"),
        ({"rope_scaling": 3}, "expected the configuration of a Llama's layer: .*rope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "Llama's layer: .*factor"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 0}}, "finite rotations"),
    ],
)
def test_configurations_that_do_not_fit(change, words, target, tmp_path) -> None:
    place = save(THIRD, weights_of(THIRD, 4), tmp_path)
    (place / "config.json").write_text(json.dumps({**config_of(THIRD), **change}))
    with pytest.raises(ValueError, match=words):
        load(place, target)


INNER = [
    ("use_input_layernorm_in_first_layer", [True, None], [False, 1]),
    ("use_last_layernorm", [True], [False]),
    ("parallel_draft_step", [1], [2, 0]),
    ("use_mtp_layernorm", [False], [True]),
    ("aux_hidden_state_layer_ids", [None, []], [[1, 2, 3]]),
    ("target_layer_ids", [None], [[1, 2, 3]]),
    ("bias", [False], [True]),
]
OUTER = [
    ("partial_rotary_factor", [1.0], [0.5]),
    ("sliding_window", [None], [64]),
    ("use_sliding_window", [False], [True]),
    ("layer_types", [["full_attention"]], [["sliding_attention"]]),
    ("logit_scale", [None], [0.5]),
    ("rope_scaling", [None], [{"rope_type": "default", "partial_rotary_factor": 0.5}]),
    ("architectures", [["LlamaForCausalLMEagle3"]], []),
    ("torch_dtype", ["bfloat16"], []),
    ("speculators_config", [{"algorithm": "eagle3"}], []),
]
SPECULATORS = Variant(
    "speculators", version=3, speculators=True, own_head=True, hidden=32, vocab=64
)


@pytest.mark.parametrize(
    ("place", "key", "fine", "other"),
    [
        *(("eagle_config", *case) for case in INNER),
        *((place, *case) for place in ("top", "transformer_layer_config") for case in OUTER),
    ],
    ids=lambda x: str(x)[:20],
)
def test_keys_are_followed_or_refused(place, key, fine, other, target, tmp_path) -> None:
    """Wherever they are: acceptance was lost without a word."""
    v = SPECULATORS if place == "transformer_layer_config" else THIRD
    folder = save(v, weights_of(v, 4), tmp_path)
    for value in (*fine, *other):
        config = config_of(v)
        (config if place == "top" else config.setdefault(place, {}))[key] = value
        (folder / "config.json").write_text(json.dumps(config))
        if value in fine:
            load(folder, target)
        else:
            with pytest.raises(ValueError, match=rf"{key}.*: expected"):
                load(folder, target)


def test_a_window_that_is_not_in_use(target: Any, tmp_path: Path) -> None:
    """As configurations of Qwen2 have it."""
    place = save(FIRST, weights_of(FIRST, 4), tmp_path)
    own = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    (place / "config.json").write_text(json.dumps({**config_of(FIRST), **own}))
    load(place, target)


def test_ids_that_the_mask_contradicts(target: Any, tmp_path: Path) -> None:
    whole = weights_of(THIRD, 4)
    mask = torch.zeros(64, dtype=torch.bool).index_fill(0, torch.arange(40) + whole["d2t"], True)
    load(save(THIRD, {**whole, "t2d": mask}, tmp_path), target)
    for wrong, words in (
        (~mask, "differs in 64"),
        (mask.roll(1), r"expected the 40 ids of d2t, given one that differs in \d+ \(first: id"),
        (mask[:40], r"expected shape \[64\], given \[40\]"),
    ):
        with pytest.raises(ValueError, match=rf"t2d: .*{words}|t2d: {words}"):
            load(save(THIRD, {**whole, "t2d": wrong}, tmp_path), target)
    with pytest.raises(ValueError, match=r"t2d: .*differs in 24"):
        load(save(FIRST, {**weights_of(FIRST, 4), "t2d": mask}, tmp_path), target)


def test_ids_in_any_order_draft_the_same_tokens(target, tmp_path, monkeypatch) -> None:
    draft, drafted = ps.Eagle.draft, []

    def watched(self: ps.Eagle, inputs: Any) -> Any:
        block = draft(self, inputs)
        drafted.append(block.tokens.tolist())
        return block

    monkeypatch.setattr(ps.Eagle, "draft", watched)
    ordered = weights_of(THIRD, 4)
    ids = torch.arange(40) + ordered["d2t"]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    mixed = {
        **ordered,
        "d2t": ids[order] - torch.arange(40),
        "lm_head.weight": ordered["lm_head.weight"][order].contiguous(),
    }
    for name, weights in (("ordered", ordered), ("mixed", mixed)):
        head = load(save(THIRD, weights, tmp_path / name), target)
        chain = ps.Chain([ps.HuggingFaceLevel(target), head], [4])
        chain.generate([3, 1, 4, 1, 5], 20, eos_token_id=[])
    half = len(drafted) // 2
    assert drafted[:half] == drafted[half:] != []


def test_ids_out_of_the_vocabulary(target: Any, tmp_path: Path) -> None:
    whole = weights_of(THIRD, 4)
    for offsets in (whole["d2t"] + 64, torch.zeros(40, dtype=torch.int64) - torch.arange(40)):
        with pytest.raises(ValueError, match=r"d2t: expected offsets to 40 different ids"):
            load(save(THIRD, {**whole, "d2t": offsets}, tmp_path), target)


def test_no_head_there(target: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a directory, or the id of a checkpoint"):
        load(tmp_path / "not there", target)
    with pytest.raises(ValueError, match=r"config.json: expected a readable config.json"):
        load(tmp_path, target)


def test_heads_are_told_from_models(target: Any, tmp_path: Path) -> None:
    for v in (FIRST, THIRD, Variant("s", version=3, speculators=True, hidden=32, vocab=64)):
        assert head_of(save(v, weights_of(v, 4), tmp_path / v.name))
    binary = Variant("binary", binary=True)
    assert head_of(save(binary, weights_of(binary, 4), tmp_path / "binary"))
    target.save_pretrained(tmp_path / "model")
    assert not head_of(tmp_path / "model")
    assert not head_of(tiny.path("drafter"))  # a Llama of one layer
    assert not head_of(tmp_path / "not there")


@pytest.mark.parametrize("part", ["/etc/x.safetensors", "../x.safetensors", "a/b.safetensors",
                                  "..", "", "c:\\x", 3, None])  # fmt: skip
def test_a_shard_index_names_files_beside_it(part: Any, target: Any, tmp_path: Path) -> None:
    place = save(FIRST, weights_of(FIRST, 4), tmp_path / "head")
    (place / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": part}}))
    with pytest.raises(ValueError, match=r"weight_map: fc\.weight: expected the name of a file"):
        load(place, target)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": 1}', '{"weight_map": {}}', "[]", "{"])
def test_a_shard_index_without_names(text: str, target: Any, tmp_path: Path) -> None:
    place = save(FIRST, weights_of(FIRST, 4), tmp_path / "head")
    (place / "model.safetensors").unlink()
    (place / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: "):
        load(place, target)


def test_heads_are_counted_without_a_gap(target: Any, tmp_path: Path) -> None:
    """A number in a tensor's name makes no heads: that many would take for ever."""
    head = {"0.0.linear.weight": torch.zeros(32, 32), "0.0.linear.bias": torch.zeros(32),
            "0.1.weight": torch.zeros(64, 32)}  # fmt: skip
    for stray in ("999999999999.0.linear.weight", "0.999999999999.linear.weight", "\u00b2.x"):
        torch.save({**head, stray: torch.zeros(1)}, tmp_path / "medusa_lm_head.pt")
        with pytest.raises(ValueError, match="expected no tensor of this name"):
            ps.Medusa.from_pretrained(tmp_path, target)


def test_weights_that_are_no_plain_numbers(target: Any, tmp_path: Path) -> None:
    v = Variant(**{**FIRST.__dict__, "binary": True})
    whole = weights_of(v, 4)
    for weight, words in (
        (whole["fc.weight"].to_sparse(), "expected plain numbers"),
        (whole["fc.weight"].to(torch.int64), r"expected floating point, given torch\.int64"),
        (whole["fc.weight"].to(torch.complex64), "expected floating point"),
    ):
        with pytest.raises(ValueError, match=rf"fc\.weight: {words}"):
            load(save(v, {**whole, "fc.weight": weight}, tmp_path), target)


def test_in_a_chain_by_its_directory(target: Any, tmp_path: Path) -> None:
    place = save(FIRST, weights_of(FIRST, 4), tmp_path / "head")
    level = ps.HuggingFaceLevel(target)
    for given in (str(place), place, f"eagle:{place}", f"w4:{place}", f"w4:eagle:{place}"):
        chain = ps.Chain([level, given], [3])
        assert isinstance(chain.drafter, ps.Eagle)
    with pytest.raises(ValueError, match=r"levels\[0\]: expected the EAGLE head .*nothing above"):
        ps.Chain([f"eagle:{place}", level])


QUESTIONS = (
    "Tom has 3 bags of 8 apples. He eats 4 of them. How many are left?",
    "A train goes 60 miles an hour. How far does it go in 2 hours?",
)


@pytest.mark.parametrize("copy", ["", "w4:"], ids=["whole", "4 bits"])
@pytest.mark.parametrize("name", tiny.HEADS)
def test_shipped_heads_draft_for_the_target(name: str, copy: str) -> None:
    place = tiny.path(name)
    assert head_of(place)
    level = load_level(tiny.path("target"))
    tokenizer = level.tokenizer()
    prompts = [tokenizer(tiny.prompt_of(question))["input_ids"] for question in QUESTIONS]
    plain = ps.Chain([level]).generate(prompts, max_new_tokens=40)
    chain = ps.Chain([level, f"{copy}{place}"], [4])
    products = torch.ops.polyspec.int4_product.default
    outputs = {call[2] for call in arguments_of(products, lambda: chain.generate(prompts, 4))}
    drawn = chain.drafter.config.draft_vocab_size or level.vocab_size  # an output head as well
    assert (drawn in outputs) == bool(copy)
    out = chain.generate(prompts, max_new_tokens=40)
    assert torch.equal(out.sequences, plain.sequences)
    # Far above chance, which is 1 in 2,048.
    target = out.stats.levels[0]
    assert target.num_accepted_tokens > 0.05 * target.num_draft_tokens


def test_all_that_is_shipped_stays_small() -> None:
    total = sum(file.stat().st_size for file in tiny.root().rglob("*") if file.is_file())
    assert total < 30e6


@pytest.mark.parametrize("copy", ["", "w4:"], ids=["whole", "4 bits"])
def test_trimmed_heads_draw_fewer_ids(copy: str) -> None:
    level, place = load_level(tiny.path("target")), tiny.path("eagle2")
    prompt = level.tokenizer()(tiny.prompt_of(QUESTIONS[0]))["input_ids"]
    plain = ps.Chain([level]).generate([prompt], max_new_tokens=40).new_tokens
    accepted = []
    for size in (1, 1200, level.vocab_size):
        chain = ps.Chain([level, f"trim:{size}:{copy}{place}"], [4])
        assert chain.drafter.capabilities.id_map.drawn.tolist() == list(range(size))
        out = chain.generate([prompt], max_new_tokens=40)
        assert out.new_tokens == plain
        accepted.append(out.stats.levels[0].num_accepted_tokens)
    assert accepted[0] < accepted[1] <= accepted[2]
    with pytest.raises(ValueError, match="ids: remove it: the head draws"):
        ps.Chain([level, f"trim:9:{tiny.path('eagle3')}"])
    with pytest.raises(ValueError, match="ids: expected"):
        ps.Chain([level, f"trim:0:{place}"])
