"""EAGLE heads for the shipped target: ``python -m polyspec_ext.tiny.train --eagle``, behind the
other stages.

Both heads learn from the same passes of the target, an EAGLE-2 head from its last hidden state and
an EAGLE-3 head from three layers. Each is unrolled over a few steps of a draft ("training-time
test", arXiv 2503.01840): from the second step on it reads its own states, and its attention sees
the target's states up to the token where the draft begins and its own behind it, as in use. Heads
that lie in the output folder are trained on.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from .. import progress
from ..drafters import checkpoint
from ..drafters.eagle import EagleConfig, EagleNetwork
from ..drafters.eagle.config import parse
from ..drafters.eagle.load import renamed
from . import HEADS, corpus
from .fit import fit

STEPS = {"eagle2": 2, "eagle3": 3}  # of a draft, that are learnt
TOKENS = 1_600_000  # of training
BATCH = 4
DRAFT_VOCAB = 1536  # ids that the EAGLE-3 head knows: 98.5 % of GSM8K's tokens
# Learning rates: what begins as a trained model is easily lost.
RATES = {"eagle2": 2e-4, "eagle3": 1e-3}
_DECAY = 0.8  # weight of a step's loss relative to the one before
_KL, _FEATURES = 0.3, 0.2  # weights beside total variation


def head_config(target: LlamaForCausalLM, name: str) -> dict[str, object]:
    """The config.json of a head, as SafeAILab's checkpoints have it."""
    own = target.config
    given: dict[str, object] = {
        "architectures": ["LlamaForCausalLM" if name == "eagle2" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.num_key_value_heads,
        "hidden_act": own.hidden_act,
        "rms_norm_eps": own.rms_norm_eps,
        "rope_theta": own.rope_parameters["rope_theta"],
        "max_position_embeddings": own.max_position_embeddings,
        "vocab_size": own.vocab_size,
        "bos_token_id": own.bos_token_id,
        "eos_token_id": own.eos_token_id,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if name == "eagle2":
        given["bias"] = False
    else:
        given["draft_vocab_size"] = DRAFT_VOCAB
    return given


def make_head(target: LlamaForCausalLM, name: str) -> EagleNetwork:
    """A head at random."""
    names = ["layers.0.hidden_norm.weight"] if name == "eagle3" else []
    config = parse(head_config(target, name), names, target.config.num_hidden_layers, name)
    return EagleNetwork(config, heads=name == "eagle3")


def load(head: EagleNetwork, place: Path) -> None:
    """What an earlier run has saved."""
    tensors = renamed(checkpoint.read_folder(place), str(place))
    tensors.pop("d2t", None)
    checkpoint.load_into(head, tensors, torch.float32, torch.device("cpu"), str(place))


@torch.no_grad()
def begin_with(head: EagleNetwork, drafter: LlamaForCausalLM, tokens: torch.Tensor) -> None:
    """`head` begins as the shipped drafter, a model of one layer of the same shape, as nearly as
    the two networks allow, and with little of the target's states: most of what it has to learn is
    known then.

    An EAGLE-1 layer has no norm in front and none behind, so both are folded into its products with
    the mean size of what they would norm. An EAGLE-3 layer has both, but its residual stream lacks
    the token's embedding.

    Args:
        tokens: ``[B, T]``, text.
    """
    (own,), final = drafter.model.layers, drafter.model.norm.weight
    layer: Any = head.layers[0]
    width, attention = head.config.hidden_size, own.self_attn
    states = drafter(input_ids=tokens, output_hidden_states=True).hidden_states[0]
    before = own.input_layernorm.weight
    layer.mlp.load_state_dict(own.mlp.state_dict())
    layer.post_attention_layernorm.load_state_dict(own.post_attention_layernorm.state_dict())
    layer.self_attn.o_proj.load_state_dict(attention.o_proj.state_dict())
    if head.config.version == 3:
        # (Not 0: there is a norm behind it.)
        head.fc.weight.mul_(0.05)
        for key in ("q_proj", "k_proj", "v_proj"):
            product = getattr(layer.self_attn, key).weight
            product.mul_(0)
            product[:, :width] = getattr(attention, key).weight
        layer.input_layernorm.weight.copy_(before)
        head.norm.weight.copy_(final)
        return

    def size(x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean(-1).sqrt().mean()

    out: list[torch.Tensor] = []
    handle = drafter.model.norm.register_forward_pre_hook(lambda _, given: out.append(given[0]))
    drafter(input_ids=tokens)
    handle.remove()
    head.fc.weight.zero_()
    # The residual stream is scaled as the final norm would.
    scale = final / size(out[0])
    for key in ("q_proj", "k_proj", "v_proj"):
        product = getattr(attention, key).weight * (before / size(states) / scale)
        getattr(layer.self_attn, key).weight.copy_(product)
    layer.self_attn.o_proj.weight.mul_(scale[:, None])
    layer.mlp.down_proj.weight.mul_(scale[:, None])
    ratio = size(out[0] * scale) / size(out[0])
    layer.post_attention_layernorm.weight.mul_(ratio / scale)
    head.fc.weight[:, :width] = torch.diag(scale)


def frequent(documents: list[torch.Tensor], size: int) -> torch.Tensor:
    """The `size` most frequent ids, ascending."""
    seen = Counter(chain.from_iterable(document.tolist() for document in documents))
    return torch.tensor(sorted(token for token, _ in seen.most_common(size)))


class Unrolled(nn.Module):
    """A head over a few steps of the drafts that begin at every token of a text.

    Args:
        head: trained.
        target: gives embeddings, and the output head where `head` has none.
        steps: of a draft.
        ids: of the draft vocabulary, ascending; None: all.
    """

    def __init__(
        self, head: EagleNetwork, target: LlamaForCausalLM, steps: int, ids: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.head, self.steps, self.ids = head, steps, ids
        self._target = [target]  # not a part of this module
        if ids is not None:
            with torch.no_grad():
                head.lm_head.weight.copy_(target.lm_head.weight[ids])

    def outputs(
        self, tokens: torch.Tensor, features: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Of each step: its number s, its states ``[B, T - 1 - s, H]`` and logits, which are about
        the token s + 2 places behind each."""
        (target,), head = self._target, self.head
        embeds = target.model.embed_tokens(tokens)
        states = head.fuse(features)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(self.steps):
            count = tokens.shape[1] - 1 - step
            seen = [(k[:, :, :count], v[:, :, :count]) for k, v in seen]

            def attention(
                layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
            ) -> torch.Tensor:
                seen.append((k, v))  # noqa: B023
                return _attend(q, seen)  # noqa: B023

            positions = torch.arange(step, step + count)[None]
            own = embeds[:, 1 + step : 1 + step + count]
            out = head(own, states[:, :count], positions, attention)
            before = head.before_head(out)
            logits = head.lm_head(before) if self.ids is not None else target.lm_head(before)
            yield step, out, logits
            states = head.carried(out)

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, wanted: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """The loss of all steps.

        Args:
            tokens: ``[B, T]``; `features`: ``[B, T, F]``, the target's states.
            wanted: ``[B, T, V]``, log-probabilities of the target.
            last: ``[B, T, H]``, its last hidden states.
        """
        total = torch.zeros(())
        for step, states, logits in self.outputs(tokens, features):
            goal = wanted[:, 1 + step :]
            goal = goal if self.ids is None else goal[..., self.ids]
            given = logits.float().log_softmax(-1)
            p, q = goal.exp(), given.exp()
            kl = (p * (goal - given)).sum(-1).mean()
            loss = 1 - torch.minimum(p, q).sum(-1).mean() + _KL * kl
            if self.head.config.version == 1:
                # What the next step reads is trained to be what the target will say.
                error = F.smooth_l1_loss(states.float(), last[:, 1 + step :].float())
                loss = loss + _FEATURES * error
            total = total + _DECAY**step * loss
        return total


def _attend(q: torch.Tensor, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Causal over the first step's keys; of later ones each query sees its own draft's only."""
    count, first = q.shape[2], seen[0]
    diagonal = torch.eye(count, dtype=torch.bool)
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    mask = torch.cat([causal, *[diagonal for _ in seen[1:]]], 1)
    keys = torch.cat([first[0], *[k for k, _ in seen[1:]]], 2)
    values = torch.cat([first[1], *[v for _, v in seen[1:]]], 2)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


@torch.no_grad()
def features_of(
    target: LlamaForCausalLM, tokens: torch.Tensor, configs: list[EagleConfig]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities, last hidden states, and what each head reads."""
    out = target(input_ids=tokens, output_hidden_states=True)
    layers = out.hidden_states
    read = [torch.cat([layers[k] for k in own.hidden_layers], -1) for own in configs]
    return out.logits.float().log_softmax(-1), layers[-1], read


@torch.no_grad()
def measure_heads(
    heads: dict[str, Unrolled], target: LlamaForCausalLM, documents: list[torch.Tensor]
) -> dict[str, dict[str, list[float]]]:
    """By head and step of a draft of the text itself: overlap with the target, E[1 - TV], at
    temperature 1, and how often both have the same argmax."""
    sums = {name: torch.zeros(2, own.steps) for name, own in heads.items()}
    counts = {name: torch.zeros(own.steps) for name, own in heads.items()}
    configs = [own.head.config for own in heads.values()]
    for document in progress.bar(documents, desc="held out", mininterval=5, leave=False):
        tokens = document[None]
        wanted, _, read = features_of(target, tokens, configs)
        for (name, own), features in zip(heads.items(), read, strict=True):
            for step, _, logits in own.outputs(tokens, features):
                goal, q = wanted[:, 1 + step :].exp(), logits.float().softmax(-1)
                best = q.argmax(-1)
                if own.ids is not None:
                    best = own.ids[best]
                    inside = torch.minimum(goal[..., own.ids], q)
                else:
                    inside = torch.minimum(goal, q)
                sums[name][0, step] += inside.sum()
                sums[name][1, step] += (best == goal.argmax(-1)).sum()
                counts[name][step] += best.numel()
    return {
        name: {
            key: [round(float(x), 4) for x in own / counts[name]]
            for key, own in zip(("overlap", "greedy_agreement"), both, strict=True)
        }
        for name, both in sums.items()
    }


def save(unrolled: Unrolled, target: LlamaForCausalLM, name: str, place: Path) -> None:
    """Config and tensors under SafeAILab's names."""
    place.mkdir(parents=True, exist_ok=True)
    tensors = {
        key.replace("layers.0.", "midlayer.") if name == "eagle3" else key: value.to(torch.bfloat16)
        for key, value in unrolled.head.state_dict().items()
    }
    if unrolled.ids is not None:
        # Offsets, and which ids of the target are known.
        tensors["d2t"] = unrolled.ids - torch.arange(len(unrolled.ids))
        tensors["t2d"] = torch.zeros(target.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][unrolled.ids] = True
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    text = json.dumps(head_config(target, name), indent=2)
    (place / "config.json").write_text(text + "\n")


def train_heads(args: argparse.Namespace) -> int:
    """Both heads, for the target that lies in the output folder, and their report."""
    with progress.loading():
        target = AutoModelForCausalLM.from_pretrained(
            args.output / "target", dtype=torch.float32
        ).eval()
    target.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.output / "target")
    texts = corpus.gsm8k(args.data / "gsm8k_train.jsonl")
    texts += corpus.shakespeare(args.data / "tinyshakespeare.txt")
    documents = corpus.encode(tokenizer, texts)
    held_out = corpus.encode(tokenizer, corpus.gsm8k(args.data / "gsm8k_test.jsonl"))[:300]
    torch.manual_seed(args.seed)
    ids = {"eagle2": None, "eagle3": frequent(documents, DRAFT_VOCAB)}
    heads = {
        name: Unrolled(make_head(target, name), target, STEPS[name], ids[name]) for name in HEADS
    }
    with progress.loading():
        drafter = AutoModelForCausalLM.from_pretrained(
            args.output / "drafter", dtype=torch.float32
        ).eval()
    sample = corpus.pack(documents, 256, torch.Generator().manual_seed(args.seed))[:8]
    for name, own in heads.items():
        if (args.output / name).exists():
            load(own.head, args.output / name)
        else:
            begin_with(own.head, drafter, sample)
    configs = [own.head.config for own in heads.values()]

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        wanted, last, read = features_of(target, tokens, configs)
        total = torch.zeros(())
        for own, features in zip(heads.values(), read, strict=True):
            total = total + own(tokens, features, wanted, last)
        return total

    fit(
        nn.ModuleList(heads.values()),
        documents,
        loss_of,
        int(TOKENS * args.scale),
        [RATES[name] for name in heads],
        "EAGLE heads",
        BATCH,
    )
    report_file = args.output / "report.json"
    report = json.loads(report_file.read_text()) if report_file.exists() else {}
    report.update(measure_heads(heads, target, held_out))
    for name, own in heads.items():
        save(own, target, name, args.output / name)
    report_file.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: report[name] for name in heads}, indent=2))
    return 0
