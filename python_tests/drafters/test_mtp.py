"""Multi-token prediction heads in every layout, against a plain pass, and in chains."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_heads import FAMILIES, LAYERS, Reference, V, change_config, save, target_of
from safetensors.torch import load_file, save_file
from small_models import make, plain_greedy
from told import draft_input, drawn_from, prompts, rounds_of, told
from transformers import cache_utils, modeling_layers

import polyspec_ext as ps
from polyspec_ext.drafters.mtp import load_mtp

PROMPTS = [[3, 9, 27, 17], [5, 6, 8], [11]]


def head_in(family: str, place: Path, heads: int = 1, **sizes: int) -> tuple[Any, Reference, Any]:
    """Return a target, a reference of its heads, and the first as it is loaded."""
    target = target_of(family, **sizes)
    reference = Reference(family, target, heads, **sizes)
    save(target, reference.tensors(), place)
    return target, reference, ps.MTP.from_pretrained(place, target)


@pytest.mark.parametrize(
    ("family", "heads", "pack"),
    [
        *((family, 1, False) for family in FAMILIES),
        *((family, 1, True) for family in ("deepseek_v3", "qwen3_5")),
        *((family, 3, False) for family in FAMILIES),
        ("mimo", 1, True),
    ],
)
def test_drafts_are_those_of_the_plain_forward_pass(family, heads, pack, tmp_path) -> None:
    # An index of the head chooses among few keys. The target's index chooses among all, because
    # rounding decides ties.
    sizes = {"index_topk": 6} if family == "deepseek_v32" else {}
    sizes |= {"head_dim": 32} if family == "mimo" and pack else {}
    target, reference, head = head_in(family, tmp_path, heads, **sizes)
    if pack:
        head = ps.MTP.from_pretrained(tmp_path, ps.Level(target, pack=True))
    assert (head._head._runs.longest > 0) == (family == "mimo" and pack)
    assert head.capabilities.hidden_layers == (-1,)  # after the final norm
    drafts = ((3, 2), (2, 1), (3, 2))
    for lengths, (texts, states, hidden) in zip(drafts, rounds_of(head, V, 32), strict=True):
        block = head.draft(draft_input(texts, lengths, hidden))
        for b, count in enumerate(lengths):
            tokens = block.tokens[b, :count].tolist()
            rows = reference.draft(texts[b], states[b], tokens).double()
            found = drawn_from(head, block, b)[:count]
            assert (found - rows).abs().max() < 1e-4 * rows.abs().max()
            assert tokens == rows.argmax(-1).tolist()


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo"])
def test_trees(family: str, tmp_path: Path) -> None:
    target, _, _ = head_in(family, tmp_path)
    level = ps.HuggingFaceLevel(target)

    def run(tree: Any) -> Any:
        chain = ps.Chain([level, ps.MTP.from_pretrained(tmp_path, level, tree=tree)], [3])
        return chain.generate(PROMPTS, max_new_tokens=8, eos_token_id=[])

    chain, line, wide = run(None), run(ps.DynamicTree(1, 4)), run(ps.DynamicTree(4, 12))
    assert chain.sequences.equal(line.sequences)
    assert chain.sequences.equal(wide.sequences)
    accepted = [out.stats.levels[0].num_accepted_tokens for out in (chain, line, wide)]
    assert accepted[0] == accepted[1] < accepted[2]
    for b, prompt in enumerate(PROMPTS):
        assert wide.sequences[b][: len(prompt) + 8].tolist() == plain_greedy(target, prompt, 8)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_logits_are_those_of_transformers(family, tmp_path, monkeypatch) -> None:
    """Compare with transformers' heads of these families, from 5.24 on, and a second step."""
    kind = getattr(modeling_layers, "MtpModel", None)
    if kind is None:
        pytest.skip("transformers has no MtpModel")
    target, _, head = head_in(family, tmp_path)
    target.config.name_or_path, target.config.dtype = str(tmp_path), torch.float32
    target.config.num_mtp_layers = 1
    # The class names the layers of the large model.
    ours = [rf"model\.layers\.{LAYERS}.*"]
    monkeypatch.setattr(target, "_keys_to_ignore_on_load_unexpected", ours)
    theirs = kind.from_pretrained(target)
    cache = cache_utils.MtpCache(config=target.config.get_mtp_config())
    text = [3, 9, 27, 17, 51, 25, 11]
    states = target.model(input_ids=torch.tensor([text[:-1]]), use_cache=False).last_hidden_state
    head.prefill(prompts(1))
    block = head.draft(draft_input([text], [2], told((-1,), [states[0]], [0])))
    found, token = drawn_from(head, block, 0), int(block.tokens[0, 0])
    for i, (ids, at) in enumerate(((text[1:], 1), ([token], 1 + len(text[1:])))):
        places = torch.arange(len(ids))[None] + at
        ids, states = torch.tensor([ids]), states[:, -len(ids) :]
        states = theirs.forward_layer(0, states, places, cache, input_ids=ids)
        wanted = target.lm_head(states[0, -1]).double()
        assert (found[i] - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    target = target_of("mimo")
    reference = Reference("deepseek_v3", target_of("deepseek_v3"))

    def refused(place: Path, words: str, target: Any = target) -> None:
        with pytest.raises(ValueError, match=words):
            ps.MTP.from_pretrained(place, target)

    plain = save(target, {}, tmp_path / "plain")
    refused(plain, r"a target of 3 layers, as one of model\.layers\.3\.eh_proj.*, given none$")
    far = save(target, reference.tensors(61), tmp_path / "far")
    refused(far, r"of 3 layers, .*given model\.layers\.61\.eh_proj\.weight$")
    whole = Reference("mimo", target).tensors()
    narrow = save(target, whole, tmp_path / "narrow")
    wide = target_of("mimo", hidden_size=40)
    refused(narrow, "a target with hidden states of 32 numbers, given one with 40", wide)
    key = "model.mtp_layers.0.self_attn.q_proj.weight"
    for change, words in (
        ({key: None}, r"mtp_layers\.0\.: layers\.0\.self_attn\.q_proj\.weight: .*given none"),
        ({key: torch.zeros(3, 32)}, r"q_proj\.weight: expected shape \[32, 32\], given \[3, 32\]"),
        ({f"{key}s": torch.zeros(1)}, r"q_proj\.weights: expected no tensor of this name"),
        ({f"{key}_scale_inv": torch.zeros(1, 1)}, r"expected .*weight_block_size in config\.json"),
    ):
        tensors = {k: w for k, w in {**whole, **change}.items() if w is not None}
        refused(save(target, tensors, tmp_path / "changed"), words)
    target = target_of("deepseek_v3")
    target.config.layer_types = ["sliding_attention", "full_attention", "full_attention"]
    heads = save(target, reference.tensors(), tmp_path / "sliding")
    refused(heads, "without sliding windows.*given layers of full_attention, sliding", target)
    with pytest.raises(ValueError, match=r"'mtp' below a Hugging Face model.*given nothing above"):
        ps.Chain(["mtp"])
    with pytest.raises(ValueError, match="expected a target with the checkpoint"):
        ps.Chain([make("llama"), "mtp"])


@pytest.mark.parametrize("sharded", [False, True])
def test_blocks_of_8_bits(sharded: bool, tmp_path: Path) -> None:
    """DeepSeek's form: matrices times a factor by block, in several files."""
    target = target_of("mimo")
    tensors = Reference("mimo", target).tensors()
    wanted, block = dict(tensors), (16, 24)
    for key, weight in tensors.items():
        if weight.dim() == 2 and ".mlp." in key:
            rows, columns = (
                -(-size // step) for size, step in zip(weight.shape, block, strict=True)
            )
            scales = torch.rand(rows, columns) + 0.5
            small = weight.to(torch.float8_e4m3fn)
            wanted[key] = small.float().clone()
            for i in range(rows):
                for j in range(columns):
                    part = wanted[key][16 * i : 16 * i + 16, 24 * j : 24 * j + 24]
                    part *= scales[i, j]
            tensors |= {key: small, f"{key}_scale_inv": scales}
            break
    named = {key.replace("model.", "model.language_model."): w for key, w in tensors.items()}
    place = save(target, named, tmp_path)
    change_config(place, quantization_config={"weight_block_size": block})
    if sharded:
        whole = load_file(place / "model.safetensors")
        (place / "model.safetensors").unlink()
        files = {key: f"part-{i % 2}.safetensors" for i, key in enumerate(sorted(whole))}
        for part in set(files.values()):
            save_file({k: whole[k] for k, file in files.items() if file == part}, place / part)
        index = json.dumps({"weight_map": files})
        (place / "model.safetensors.index.json").write_text(index)
    found = load_mtp(place, target).network.state_dict()
    for key, weight in wanted.items():
        name = key.removeprefix("model.mtp_layers.0.")
        if f"layers.0.{name}" in found:
            assert found[f"layers.0.{name}"].equal(weight)
    assert sum(key.startswith("layers.0.") for key in found) == len(wanted) - 4


def test_what_routes_to_experts_stays_in_float32(tmp_path: Path) -> None:
    target = target_of("deepseek_v3")
    place = save(target, Reference("deepseek_v3", target).tensors(), tmp_path)
    target.to(torch.bfloat16)
    for layer in target.model.layers[1:]:
        layer.mlp.gate.to(torch.float32)
    head = load_mtp(place, target)
    kinds = {key: weight.dtype for key, weight in head.network.state_dict().items()}
    exact = {key for key, kind in kinds.items() if kind == torch.float32}
    assert exact == {
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.gate.e_score_correction_bias",
    }
    drafter = ps.MTP(head)
    drafter.prefill(prompts(1))
    states = torch.randn(3, 32)
    block = drafter.draft(draft_input([[3, 9, 27, 17]], [3], told((-1,), [states], [0])))
    assert block.tokens.shape == (1, 3)
