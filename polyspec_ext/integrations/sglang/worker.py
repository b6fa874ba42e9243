"""The algorithm POLYSPEC of SGLang: levels below its target draft, and `rule` verifies.

The worker is SGLang's n-gram worker, which supports drafters on the host, with replaced drafts. It
passes them to the target as trees; a chain's tree has no branches.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import numpy as np
import torch

from .. import Settings
from .rule import Drawn

NAME = "POLYSPEC"


def register(settings: Settings) -> None:
    """Register the algorithm with workers that draft by a chain of the settings' levels."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        """An algorithm with SGLang's properties of n-gram, but other drafts."""

        ngram = SpeculativeAlgorithm.NGRAM

        def handle_server_args(self, server_args: Any) -> None:
            """Set the width of a verification to the first level's window and the root."""
            width = settings.window[0] + 1
            configured = server_args.speculative_num_draft_tokens
            if configured not in (None, width):
                raise ValueError(
                    f"speculative_num_draft_tokens: expected {width}, the first window and 1, given"
                    f" {configured}"
                )
            server_args.speculative_num_draft_tokens = width
            server_args.speculative_num_steps = settings.window[0]
            server_args.speculative_eagle_topk = 1
            server_args.enable_mixed_chunk = False
            if server_args.max_running_requests is None:
                server_args.max_running_requests = 48

    for name in vars(SpeculativeAlgorithm):
        missing = name[0] != "_" and not hasattr(Algorithm, name)
        if missing or name.startswith(("is_", "supports_", "has_")):
            setattr(Algorithm, name, property(operator.attrgetter(f"ngram.{name}")))
    registers = SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)
    registers(lambda server_args: worker_class(settings))


def worker_class(settings: Settings) -> type:
    """Return the class of the workers that draft by a chain of the settings' levels."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class Worker(NGRAMWorker):  # type: ignore[misc]
        """SGLang's n-gram worker with the drafts of a chain."""

        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
            config = target_worker.model_runner.model_config
            self.chain = settings.load(
                self.device,
                vocab_size=config.vocab_size,
                tokenizer=getattr(target_worker, "tokenizer", None),
                max_tokens=config.context_len,
            )
            self.drawn: Drawn | None = None

        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            """Return ids [B * width] of roots and drafts, and the mask [B * width * width]."""
            width, count = self.draft_token_num, len(batch.reqs)
            names = [request.rid for request in batch.reqs]
            lengths = self.chain.lengths
            for name in lengths.keys() - set(names):  # finished, or retracted
                self.chain.remove(name)
            ids = np.zeros((count, width), dtype=np.int64)
            for row, accepted in enumerate(self._accepted(batch)):
                ids[row, 0] = self._follow(batch.reqs[row], accepted, lengths.get(names[row], 0))
            self.chain.propose(dict.fromkeys(names, width - 1))
            rows = torch.full((count, width - 1), -1)
            pools, size = [], 0
            for row, name in enumerate(names):
                drafts = self.chain.pending(name)
                number = min(len(drafts.tokens), width - 1)
                if drafts.logits is not None:
                    ids[row, 1 : number + 1] = drafts.tokens[:number]
                    rows[row, :number] = torch.arange(size, size + number)
                    pools.append(drafts.logits[:number])
                    size += number
            self.drawn = None
            if pools:
                self.drawn = Drawn(torch.cat(pools).to(self.device), rows.to(self.device))
            mask = np.tile(np.tri(width, dtype=bool), (count, 1, 1))
            return ids.reshape(-1), mask.reshape(-1)

        def _prepare_for_speculative_decoding(self, batch: Any) -> None:
            super()._prepare_for_speculative_decoding(batch)
            if batch.forward_mode.is_target_verify():
                batch.spec_info.polyspec = self.drawn

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Leave the corpus empty."""

        def _accepted(self, batch: Any) -> list[list[int]]:
            # With overlap the results of a step are processed after the next step's draft.
            if not self.enable_overlap or batch.grammar_needs_sync():
                return [[] for _ in batch.reqs]
            counts = batch.spec_info.accept_lens.tolist()
            tokens = batch.spec_info.accept_tokens.view(len(counts), -1).tolist()
            return [row[:count] for row, count in zip(tokens, counts, strict=True)]

        def _follow(self, request: Any, accepted: list[int], known: int) -> int:
            """Send a request's tokens after the first `known` to the chain; return the last."""
            name, prompt = request.rid, request.origin_input_ids_unpadded
            if known:
                text = [*request.output_ids[known - len(prompt) :], *accepted]
                self.chain.commit(name, text)
            else:
                sampling = request.sampling_params
                text = [*prompt, *request.output_ids, *accepted]
                seed = sampling.sampling_seed
                if seed is None:  # the same on all ranks
                    digest = hashlib.sha256(name.encode()).digest()
                    seed = int.from_bytes(digest[:8], "little")
                self.chain.add(
                    name,
                    text,
                    temperature=0.0 if sampling.top_k == 1 else sampling.temperature,
                    top_k=min(max(sampling.top_k, 0), self.chain.vocab_size),
                    top_p=sampling.top_p,
                    min_p=sampling.min_p,
                    seed=seed % 2**64,
                )
            return int(text[-1])

    return Worker
