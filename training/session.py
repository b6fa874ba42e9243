"""Training of a head, from texts to a directory that a chain loads. A run can be stopped and
resumed at any time.

The target reads each block of rows once. Its states stay in memory while the head learns from them
and from the states of the last few blocks.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from polyspec_ext import progress
from polyspec_ext.drafters import dflash, eagle
from polyspec_ext.drafters.dflash import DFlashNetwork
from polyspec_ext.drafters.eagle import EagleNetwork
from polyspec_ext.drafters.mtp import new_mtp
from polyspec_ext.files import replace_text, replacing

from . import heads
from .heads import Settings
from .texts import Document, Stream, frequent
from .unrolled import Drafts, States, Teacher, Unrolled, measure_acceptance, mixed

_LEAST = 0.05  # share of the rate at the end


class Steps:
    """AdamW over float32 `parameters`. The learning rate rises to `rate` in `warm` steps, stays
    constant up to the share `stay` of the run, and decays."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        rate: float,
        warm: int = 20,
        stay: float = 0.4,
    ) -> None:
        self.parameters, self.rate, self.count = list(parameters), rate, 0
        self._warm, self._stay = warm, stay
        groups = [
            {"params": [p for p in self.parameters if (p.dim() > 1) == matrices], "weight_decay": w}
            for matrices, w in ((True, 0.1), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)

    def step(self, loss: torch.Tensor, way: float) -> None:
        """Take a step down `loss`; `way` is the finished share of the run, in [0, 1]."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        rest = min(1.0, max(0.0, (way - self._stay) / (1 - self._stay)))
        factor = _LEAST + (1 - _LEAST) * 0.5 * (1 + math.cos(math.pi * rest))
        factor = min(factor, (self.count + 1) / self._warm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1


_BLOCKS = 8  # blocks with states in memory
_LAYERS = 3
_FIRST = 4  # blocks for fitting the first weights
_SMOOTH = 0.95


class HeadTraining:
    """Training of a head for `target`.

    Args:
        target: a causal language model of transformers on the CPU, in eval mode.
        documents: training texts; `held_out`: texts of the report.
        place: the head's directory. Its folder ``training`` has the files for a resumed run.
        begin: sets the first weights of a new head; None: a function of `heads` does, except for
            EAGLE-2 heads, which start with random weights.
    """

    def __init__(
        self,
        target: Any,
        documents: Sequence[Document],
        held_out: Sequence[Document],
        place: Path,
        settings: Settings,
        *,
        resume: bool = False,
        begin: Callable[[Any], None] | None = None,
    ) -> None:
        text = target.config.get_text_config(decoder=True)
        layers = text.num_hidden_layers
        if settings.version == 3 and layers < _LAYERS:
            raise ValueError(
                f"target: expected at least {_LAYERS} layers, whose states the head reads, "
                f"given {layers}"
            )
        self._held_out, self._place, self._settings = held_out, place, settings
        self._stream = Stream(documents, settings.length, settings.seed)
        self._config = heads.head_config(text, settings)
        ids, self._vocab_size = None, text.vocab_size
        if settings.draft_vocab is not None and settings.draft_vocab < text.vocab_size:
            ids = frequent(documents, settings.draft_vocab, text.vocab_size)
        torch.manual_seed(settings.seed)
        self._names: dict[str, str] = {}  # checkpoint names of renamed tensors
        head: Any
        if settings.block_size:
            self._config = heads.block_config(target.config, self._config, settings)
            names = [f"layers.{i}." for i in range(settings.layers)]
            head = DFlashNetwork(dflash.parse(self._config, names, layers, "head"))
        elif settings.version == 0:
            # (Not a model's architecture, so that no program loads it as a model.)
            self._config = {"architectures": ["MTPHead"], "num_nextn_predict_layers": 1}
            head, self._names = new_mtp(target)
        else:
            head = EagleNetwork(eagle.parse(self._config, ["layers.0."], layers, "head"))
        self._teacher = Teacher(target, head.config, ids)
        first = self._stream.rows(0, 4)
        self._teacher.require_plain_head(first.tokens[:1, :32])
        if settings.version == 3:
            self._teacher.measure(first)
        self._drafts: Drafts = Unrolled(head, self._teacher, settings.steps)
        if settings.block_size:
            self._drafts = heads.Blocks(head, self._teacher, head.config.num_drafts)
        self._steps = Steps(head.parameters(), settings.rate)
        begins = torch.tensor([(len(doc.ids), doc.begin) for doc in documents]).flatten()
        content = torch.cat([*(doc.ids for doc in documents), begins]).numpy().tobytes()
        self._texts = hashlib.sha256(content).hexdigest()[:16]
        self._block = self._batch = 0  # the next
        self._seconds, self._smooth = 0.0, [0.0] * (1 + self._drafts.steps)
        self._work = place / "training"
        self._states: dict[int, States] = {}
        if resume:
            self._restore()
            return
        if (self._work / "run.pt").exists():
            raise ValueError(
                f"resume: expected --resume, or another --output, given {place}, where a run has "
                "been begun"
            )
        if begin is not None:
            begin(head)
        elif settings.version != 1:
            fitted: Any = heads.begin_eagle3 if settings.version else heads.begin_mtp
            fitted = heads.begin_blocks if settings.block_size else fitted
            fitted(head, self._teacher, [self._states_of(number) for number in range(_FIRST)])

    @property
    def tokens(self) -> int:
        """Tokens that the target has read."""
        return self._block * self._settings.block * self._settings.length

    def run(
        self, tokens: int | None = None, minutes: float | None = None, every: int = 120
    ) -> None:
        """Learn until the target has read `tokens` tokens, or for `minutes` minutes, including
        earlier runs, whichever is first. The learning rate decays towards that end. Write a
        checkpoint every `every` seconds."""
        settings, saved = self._settings, time.monotonic()
        began, size = saved - self._seconds, settings.block * settings.length
        count = math.ceil(settings.epochs * settings.block / settings.batch)  # batches of a block
        self._drafts.train()
        total = None if tokens is None else max(tokens, 1)
        bar = progress.bar(total=total, initial=self.tokens, desc="tokens", mininterval=5, unit="")

        def way() -> float:
            read = (self._block + self._batch / count) * size
            share = 0.0 if minutes is None else self._seconds / 60 / minutes
            return share if total is None else max(share, read / total)

        batches: list[torch.Tensor] = []
        with bar:  # without minutes, a started block is finished
            while way() < 1 or (self._batch and minutes is None):
                batches = batches or self._batches()
                with mixed():
                    loss, overlaps = self._drafts(self._pick(batches[self._batch]))
                self._steps.step(loss, way())
                pairs = zip(self._smooth, (loss.item(), *overlaps), strict=True)
                self._smooth = [_SMOOTH * old + (1 - _SMOOTH) * new for old, new in pairs]
                self._batch += 1
                self._seconds = time.monotonic() - began
                bar.set_postfix_str(self._figures(), refresh=False)
                if self._batch == count:
                    self._block, self._batch, batches = self._block + 1, 0, []
                    bar.update(size)
                    progress.phase(
                        f"{self.tokens:,} tokens, {self._seconds / 60:.1f} min: {self._figures()}"
                    )
                if time.monotonic() - saved > every:
                    self.save()
                    saved = time.monotonic()
        self._drafts.eval()
        self.save()

    def report(self) -> dict[str, Any]:
        """Return acceptance by position on the held-out texts, and write it beside the head."""
        self._drafts.eval()
        report = {
            **measure_acceptance(self._drafts, self._held_out),
            "tokens_read": self.tokens,
            "updates": self._steps.count,
            "seconds": round(self._seconds),
            **asdict(self._settings),
        }
        (self._place / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        return report

    def _figures(self) -> str:
        correction = 1 - _SMOOTH ** max(1, self._steps.count)
        loss, *overlaps = (x / correction for x in self._smooth)
        return f"loss {loss:.3f}, overlap " + " ".join(f"{x:.3f}" for x in overlaps)

    def _batches(self) -> list[torch.Tensor]:
        """Return indices of rows for the next block, by batch: the rows of the block, and
        `epochs` - 1 times as many random rows of the last blocks."""
        settings = self._settings
        first = max(0, self._block - _BLOCKS + 1)
        for number in range(first, self._block + 1):
            self._states_of(number)
        self._states.pop(first - 1, None)
        generator = torch.Generator().manual_seed(settings.seed + self._block)
        new, end = self._block * settings.block, (self._block + 1) * settings.block
        again = (settings.epochs - 1) * settings.block
        repeated = torch.randint(first * settings.block, end, (again,), generator=generator)
        order = torch.cat([torch.arange(new, end), repeated])
        return list(order[torch.randperm(len(order), generator=generator)].split(settings.batch))

    def _pick(self, places: torch.Tensor) -> States:
        rows = [divmod(index, self._settings.block) for index in places.tolist()]
        fields = zip(*(tuple(f[i] for f in self._states[b]) for b, i in rows), strict=True)
        return States(*(torch.stack(field) for field in fields))

    def _states_of(self, number: int) -> States:
        settings = self._settings
        if number not in self._states:
            rows = self._stream.rows(number * settings.block, settings.block)
            self._states[number] = self._teacher.read(rows, settings.batch)
        return self._states[number]

    def save(self) -> None:
        """Save the head under the published names, in bfloat16, and the state for a resumed run.
        Each file is replaced atomically."""
        weights, ids = self._drafts.head.state_dict(), self._teacher.ids
        tensors = {self._names.get(key, key): value for key, value in weights.items()}
        if self._settings.version == 3:
            tensors["fc.weight"] = tensors["fc.weight"] / self._teacher.scale
            if not self._settings.block_size:
                tensors = {key.replace("layers.0.", "midlayer."): x for key, x in tensors.items()}
            if not self._settings.block_size or ids is not None:
                tensors["lm_head.weight"] = self._teacher.head
        tensors = {key: value.bfloat16().contiguous() for key, value in tensors.items()}
        if ids is not None:  # offsets, and a mask of the target's ids
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.isin(torch.arange(self._vocab_size), ids)
        self._work.mkdir(parents=True, exist_ok=True)
        with replacing(self._place / "model.safetensors") as file:
            save_file(tensors, file, {"format": "pt"})
        replace_text(self._place / "config.json", json.dumps(self._config, indent=2) + "\n")
        state = {
            "settings": asdict(self._settings),
            "texts": self._texts,
            "head": weights,
            "scale": self._teacher.scale,
            "steps": self._steps.count,
            "optimizer": self._steps.optimizer.state_dict(),
            "at": (self._block, self._batch),
            "seconds": self._seconds,
            "smooth": self._smooth,
        }
        with replacing(self._work / "run.pt") as file:
            torch.save(state, file)

    def _restore(self) -> None:
        file = self._work / "run.pt"
        if not file.exists():
            raise ValueError(f"resume: expected a run that was begun, given none in {self._place}")
        state = torch.load(file, weights_only=True)
        current = {**asdict(self._settings), "texts": self._texts}
        begun = {**state["settings"], "texts": state["texts"]}
        for key, value in begun.items():
            if current[key] != value:
                raise ValueError(
                    f"{key}: expected {value}, with which the run in {self._place} was begun, "
                    f"given {current[key]}"
                )
        self._drafts.head.load_state_dict(state["head"])
        self._teacher.scale = state["scale"]
        self._steps.count = state["steps"]
        self._steps.optimizer.load_state_dict(state["optimizer"])
        self._block, self._batch = state["at"]
        self._seconds, self._smooth = state["seconds"], list(state["smooth"])
