"""Calls of the operators: as the dispatcher sees them, and the same call with rows elsewhere."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

import polyspec_ext as ps


def equal(a: Any, b: Any) -> bool:
    """Whether all tensors are bitwise equal, wherever they lie, with NaN equal to itself."""
    pairs = zip(a, b, strict=True)
    return all(x.cpu().nan_to_num(99.0).equal(y.cpu().nan_to_num(99.0)) for x, y in pairs)


def blocks(batch, k, vocab, draft_vocab=None, dtype=torch.float32, device="cpu", **sampling):
    """Return drafted blocks of some lengths, some of their tokens to be accepted; rows start at any
    address."""
    width = vocab if draft_vocab is None else draft_vocab
    draft = torch.randn(batch, k, width + 3, device=device)[..., :width]
    target = torch.randn(batch, k + 1, vocab + 3, device=device)[..., :vocab]
    target[:, :k, :width] = draft + 0.4 * target[:, :k, :width]
    draft, target = draft.to(dtype), target.to(dtype)
    drawn = [ps.sample(draft[:, i], **sampling, position=i, level=2) for i in range(k)]
    return {
        "target_logits": target,
        "draft_tokens": torch.stack([d.tokens for d in drawn], 1),
        "draft_logits": draft,
        "draft_statistics": torch.stack([d.statistics for d in drawn], 1),
        "draft_lengths": (k - torch.arange(batch, device=device)) % (k + 1),
        "seed": torch.arange(batch, device=device),
        **sampling,
    }


class _Spy(TorchDispatchMode):
    def __init__(self, operator: Any, seen: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._operator, self._seen = operator, seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func is self._operator:
            self._seen.append(args)
        return func(*args, **(kwargs or {}))


def arguments_of(operator: Any, call: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Return the arguments of every call of `operator` in `call`, as the dispatcher sees them."""
    seen: list[tuple[Any, ...]] = []
    with _Spy(operator, seen):
        call()
    return seen


def slotted(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with the requests' parameters at slots of longer arrays."""
    batch = len(call["seed"])
    slots = torch.randperm(batch + 3, device=call["seed"].device)[:batch]
    made = {**call, "slots": slots}
    for name in ("temperature", "seed", "position", "room", "eos"):
        given = call.get(name)
        if isinstance(given, torch.Tensor):
            made[name] = given.new_full((batch + 3, *given.shape[1:]), -1)
            made[name][slots] = given
    return made


def pooled(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with its draft rows in another order in a pool, strided, with others."""
    logits, statistics = call["draft_logits"], call["draft_statistics"]
    batch, k, vocab = logits.shape
    order = torch.randperm(batch * k + 4, device=logits.device)[: batch * k]
    pool = logits.new_full((batch * k + 4, vocab + 3), torch.nan)[:, 2 : 2 + vocab]
    pool[order] = logits.flatten(0, 1)
    both = statistics.new_zeros(batch * k + 4, 2)
    both[order] = statistics.flatten(0, 1)
    rows = order.view(batch, k)
    return {**call, "draft_logits": pool, "draft_rows": rows, "draft_statistics": both}


def ragged(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with the target's rows, and each request's tokens, without gaps."""
    lengths, k = call["draft_lengths"], call["draft_tokens"].shape[1]
    mask = torch.arange(k + 1, device=lengths.device) <= lengths[:, None]
    made = {**call, "target_logits": call["target_logits"][mask], "draft_lengths": None}
    made |= {"offsets": pad((lengths + 1).cumsum(0), (1, 0)), "draft_len": k}
    for name in {"draft_tokens", "draft_rows"} & call.keys():
        made[name] = pad(call[name], (0, 1), value=-9)[mask]
    return made


def ragged_trees(call: dict[str, Any]) -> dict[str, Any]:
    """Return the same of `verify_tree`."""
    counts, nodes = call["counts"], call["draft_tokens"].shape[1]
    mask = torch.arange(nodes + 1, device=counts.device) <= counts[:, None]
    made = {**call, "counts": None, "target_logits": call["target_logits"][mask], "nodes": nodes}
    made |= {"offsets": pad((counts + 1).cumsum(0), (1, 0))}
    made["draft_rows"] = call["draft_rows"][mask]
    for name in ("draft_tokens", "parents"):
        made[name] = pad(call[name], (0, 1), value=-9)[mask]
    return made


def function_of_prefix(call: Any) -> Any:
    """Have a processor state that its scores follow from prefix and scores alone."""
    call.function_of_prefix = True
    return call
