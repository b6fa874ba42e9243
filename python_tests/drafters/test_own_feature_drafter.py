"""A user's drafter over `FeatureCache`: one layer of attention over pairs of a verifier's hidden
state and the next token. Its drafts are the drafts of a pass over the whole text, with either
executor."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from device_rounds import same
from toy_trees import StayingTrees
from transformers import LlamaConfig

import polyspec_ext as ps
from polyspec_ext.drafters import DraftBlock, DraftInput, RowBuffer
from polyspec_ext.drafters.base import DrafterCapabilities
from polyspec_ext.drafters.features import FeatureCache

LAYER, SIZE = 1, 6  # of the hidden states
PROMPTS = [[1, 0, 2], [2], [0, 0, 1, 2, 1]]
CPU = torch.device("cpu")


class OwnDrafter:
    """Remembers pairs, and drafts from the state of the last."""

    name, max_length, device = "own", None, CPU

    def __init__(self, vocab: int) -> None:
        self.vocab_size, self.num_forward_passes, self.checked = vocab, 0, 0
        random = torch.Generator().manual_seed(3)
        self._pair, self._q, self._k, self._v, self._out = (
            torch.randn(inner, outer, generator=random)
            for inner, outer in ((SIZE + vocab, SIZE), *[(SIZE, SIZE)] * 3, (SIZE, vocab))
        )
        layer = LlamaConfig(
            num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=SIZE
        )
        self._features = FeatureCache(layer, SIZE, SIZE, torch.float32, CPU)

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(
            hidden_layers=(LAYER,),
            hidden_size=SIZE,
            keeps_lengths=True,
            device_lengths=self._features.in_one_place,
        )

    def prefill(self, prompts: Any) -> None:
        self._features.begin(len(prompts.tokens), prompts.capacity)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """The states come with the next draft."""

    def rollback(self, lengths: Any) -> Any:
        self._features.rollback(lengths)
        return lengths

    def select(self, rows: Sequence[int]) -> None:
        self._features.select(rows)

    def reserve_span(self, tokens: int) -> Any:
        return self._features.reserve_span(tokens)

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """The device knows the pairs."""

    def draft(self, inputs: DraftInput) -> DraftBlock:
        states = self._features.read(inputs, (LAYER,), self._append, self._append)
        self._check(inputs, states)
        more = inputs.counts.less(0, 1)
        parameters, logits, drawn = inputs.parameters.on(CPU).values(), [], []
        for i in range(inputs.most):
            if i:
                states = self._append(drawn[-1].tokens[:, None], states, more, stays=False)
            logits.append(states[:, 0] @ self._out)
            drawn.append(
                ps.sample(
                    logits[-1], *parameters, inputs.positions + i, inputs.level, inputs.rounds
                )
            )
        self.num_forward_passes += inputs.most
        tokens, status, statistics = (
            torch.stack([getattr(one, name) for one in drawn], 1)
            for name in ("tokens", "status", "statistics")
        )
        rows = RowBuffer(torch.stack(logits, 1), statistics) if inputs.wants_rows else None
        return DraftBlock(tokens, status=status, rows=rows)

    def _append(self, tokens, features, counts, stays=True) -> torch.Tensor:
        positions, mask = self._features.inputs(tokens.shape[1], counts)
        x = self._pairs(tokens, features, positions)
        keys, values = self._features.cache.update(
            (x @ self._k)[:, None], (x @ self._v)[:, None], 0
        )
        scores = (x @ self._q)[:, None] @ keys.transpose(2, 3)
        seen = (scores if mask is None else scores + mask).softmax(-1)
        out = (seen @ values)[:, 0].tanh()
        if stays:
            self._features.appended(counts)
        last = counts.less(1).on(CPU)
        return out.gather(1, last[:, None, None].expand(-1, 1, SIZE))

    def _pairs(self, tokens, features, positions) -> torch.Tensor:
        names = torch.nn.functional.one_hot(tokens.clamp(0), self.vocab_size).float()
        pairs = torch.cat([features, names], -1) @ self._pair
        return pairs + torch.cos(0.1 * positions)[..., None]

    def _check(self, inputs: DraftInput, states: torch.Tensor) -> None:
        """Compare with states of any toy level: the token and its position."""
        for b, length in enumerate(inputs.lengths if inputs.text else ()):
            text = inputs.text(b)
            if not length or len(text) == 1:
                continue
            features = torch.zeros(1, len(text) - 1, SIZE)
            features[0, :, 0], features[0, :, 1] = text[:-1], torch.arange(len(text) - 1)
            x = self._pairs(text[None, 1:], features, torch.arange(len(text) - 1)[None])
            seen = ((x[:, -1:] @ self._q) @ (x @ self._k).transpose(1, 2)).softmax(-1)
            assert (states[b] - (seen @ (x @ self._v))[0].tanh()).abs().max() < 1e-4
            self.checked += 1


@pytest.mark.parametrize("window", [[3], [4, 2]], ids=str)
def test_both_executors_draft_from_the_same_states(window: list[int]) -> None:
    outputs, options = [], {"temperature": 1.0, "seed": 4, "eos_token_id": []}
    for sync in (True, False):
        drafter = OwnDrafter(3)
        levels = [StayingTrees(drafter.vocab_size, 11 + i, size=SIZE) for i in range(len(window))]
        chain = ps.Chain([*levels, drafter], window, sync_each_step=sync)
        outputs.append(chain.generate(PROMPTS, [30, 9, 17], **options))
        assert drafter.checked > 10 or not sync
    same(*outputs)
