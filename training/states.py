"""What a head learns from: the target's states of rows of text, and the ids and rows of the output
head that it knows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from polyspec_ext.drafters.heads import HeadConfig

from .rows import Rows

_OUTLIER = 8  # times the median size: a state that no scale is measured on


class States(NamedTuple):
    """A target's states of some rows, in bfloat16."""

    tokens: torch.Tensor  # [R, T] int64
    learnt: torch.Tensor  # [R, T] bool
    features: torch.Tensor  # [R, T, F], what a head reads, in units of `Teacher.scale`
    last: torch.Tensor  # [R, T, H], what the target's output head reads


class Teacher:
    """A target, as a head learns from it.

    Args:
        model: a causal language model of transformers on the CPU.
        config: of the head.
        ids: ``[Vd]`` int64 that the head knows, ascending; None: all.

    Attributes:
        scale: ``[F]`` float32, the size of each feature. A few are a thousand times as large as
            others in many models, so a head learns from features in units of it.
        gain: ``[H]`` float32, the size of each number of the last states.

    Raises:
        ValueError: the logits are not the product of the last states and the output head.
    """

    def __init__(self, model: Any, config: HeadConfig, ids: torch.Tensor | None) -> None:
        self._model, self._layers, self.ids = model, config.hidden_layers, ids
        self.embed = model.get_input_embeddings()
        weight = model.get_output_embeddings().weight.detach()
        self.head = weight if ids is None else weight[ids].contiguous()
        self._all = weight
        self.scale, self.gain = torch.ones(config.feature_size), torch.ones(weight.shape[1])

    def readout(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[.., Vd]``, logits of states that the output head reads."""
        return F.linear(states, self.head.to(states.dtype))

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[.., V]`` of all ids, float32."""
        return F.linear(states.to(self._all.dtype), self._all).float()

    @torch.no_grad()
    def read(self, rows: Rows, batch: int = 4) -> States:
        """Run a pass of the target over every row."""
        features, last = self._passes(rows.tokens, batch)
        features = features / self.scale
        return States(rows.tokens, rows.learnt, features.bfloat16(), last.bfloat16())

    @torch.no_grad()
    def entering(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the target's last layer reads ``[R, T, H]``, float32."""
        decoder = self._model.get_decoder()
        out = decoder(input_ids=tokens, output_hidden_states=True, use_cache=False)
        states: torch.Tensor = out.hidden_states[-2].float()
        return states

    @torch.no_grad()
    def measure(self, rows: Rows) -> None:
        """Set `scale` and `gain`, from these rows."""
        self.scale, self.gain = map(_sizes, self._passes(rows.tokens, 4))

    def require_plain_head(self, tokens: torch.Tensor) -> None:
        """Refuse a model that makes something else of its last states than their product with the
        output head, such as capped or scaled logits."""
        with torch.no_grad():
            whole = self._model(input_ids=tokens).logits.float()
            own = self.logits(self._passes(tokens, 1)[1])
        if whole.shape != own.shape or (whole - own).abs().max() > 0.05 * whole.abs().max():
            raise ValueError(
                "target: expected a model whose logits are the product of its last hidden states "
                f"and its output head, given {type(self._model).__name__}, which does something "
                "else with them"
            )

    def _passes(self, tokens: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Yield ``[R, T, F]`` and ``[R, T, H]``, features and last states, so many rows at a
        time."""
        features, last = [], []
        for part in tokens.split(batch):
            out = self._model.get_decoder()(
                input_ids=part, output_hidden_states=True, use_cache=False
            )
            features.append(torch.cat([out.hidden_states[k] for k in self._layers], -1))
            last.append(out.last_hidden_state)
        return torch.cat(features), torch.cat(last)


def _sizes(states: torch.Tensor) -> torch.Tensor:
    rows = states.flatten(0, -2).float()
    size = rows.norm(dim=-1)
    return rows[size < _OUTLIER * size.median()].pow(2).mean(0).sqrt().clamp_min(1e-6)
