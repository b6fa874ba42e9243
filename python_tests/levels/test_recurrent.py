"""A model of `transformers` with a recurrent state in one file, through public names alone: text is
folded into a vector a row, so it goes back to checkpoints only, and keeps fewer tokens than asked.
The texts are the texts of a level that goes back to any token."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import polyspec_ext as ps
from polyspec_ext.kv_cache import SequenceState
from polyspec_ext.levels import (
    RowCounts,
)

V, STATES = 12, 997
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]
LIMITS = [30, 9, 21]  # rows leave the batch, and the others move


def generate(made: Sequence[ps.HuggingFaceLevel], temperature: float) -> ps.Output:
    sampling: dict[str, Any] = {"seed": [1, 2, 3], "eos_token_id": []}
    return ps.Chain(made, [5, 3][3 - len(made) :]).generate(
        PROMPTS, LIMITS, temperature, **sampling
    )


class FoldedConfig(PretrainedConfig):
    model_type = "folded"

    def __init__(self, **options: Any) -> None:
        super().__init__(vocab_size=V, hidden_size=8, num_hidden_layers=1, **options)


class Folded(SequenceState):
    """A vector a row with a checkpoint every `every` tokens, for `HuggingFaceLevel`."""

    batches = True

    def __init__(self, rows: int, every: int) -> None:
        self.every, self.missing, self._counts = every, 0, [0] * rows
        # By row, length and state: of its checkpoints, and then of its end.
        self.rows: list[list[tuple[int, torch.Tensor]]] = [
            [(0, torch.zeros(8))] for _ in range(rows)
        ]

    def inputs(self, tokens, counts=None, **more) -> dict[str, Any]:
        self._counts = [tokens] * len(self.rows) if counts is None else list(counts)
        return {}

    def fold(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states ``[B, T, H]`` after each of `x`."""
        states = torch.full_like(x, float("nan"))
        for b, (row, count) in enumerate(zip(self.rows, self._counts, strict=True)):
            for t in range(count):
                length, state = row[-1]
                if length % self.every:
                    row.pop()
                states[b, t] = (0.6 * state.roll(1) + x[b, t]).tanh()
                row.append((length + 1, states[b, t]))
        return states

    def rollback(self, lengths: RowCounts) -> list[int]:
        for row, length in zip(self.rows, lengths, strict=True):
            while row[-1][0] > length:
                row.pop()
            self.missing += length - row[-1][0]
        return [row[-1][0] for row in self.rows]

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


class FoldedModel(PreTrainedModel):
    config_class = FoldedConfig
    _supports_sdpa = True  # nothing attends to anything

    def __init__(self, config: FoldedConfig) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(V, 8)
        self.lm_head = torch.nn.Linear(8, V, bias=False)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, input_ids, past_key_values=None, position_ids=None, **more) -> CausalLMOutput:
        state = Folded(len(input_ids), 1) if past_key_values is None else past_key_values
        if past_key_values is None:
            state.inputs(input_ids.shape[1])
        return CausalLMOutput(logits=self.lm_head(state.fold(self.embed(input_ids))))


def folded_levels(every: Sequence[int], made: list[Folded]) -> list[ps.HuggingFaceLevel]:
    """Return levels of one model, each a little off; `made` gets their states as they come."""

    def state(rows: int, every: int) -> Folded:
        made.append(Folded(rows, every))
        return made[-1]

    found = []
    for seed, n in enumerate(every):
        torch.manual_seed(7)
        model = FoldedModel(FoldedConfig()).eval()
        torch.manual_seed(seed)
        for weight in model.parameters():
            weight.data += 0.3 * torch.randn_like(weight)
        name = f"level {seed}"
        found.append(ps.HuggingFaceLevel(model, name=name, new_cache=partial(state, every=n)))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("every", [[4], [3, 1], [1, 3], [4, 3, 2]], ids=str)
def test_a_hugging_face_model_with_a_recurrent_state(every: list[int], temperature: float) -> None:
    states: list[Folded] = []
    made = folded_levels(every, states)
    assert all(level.supports_batches and level.no_trees is not None for level in made)
    states.clear()
    out = generate(made, temperature)
    wanted = generate(folded_levels([1] * len(every), []), temperature)
    assert out.sequences.equal(wanted.sequences)
    assert any(state.missing for state in states) == (len(every) > 1)
    if temperature == 0:
        model = made[0].model
        for prompt, limit, text in zip(PROMPTS, LIMITS, out.sequences, strict=True):
            ids = list(prompt)
            for _ in range(limit):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            assert text[: len(ids)].tolist() == ids
