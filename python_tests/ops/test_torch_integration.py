"""The operators inside torch: opcheck, torch.compile, batches, strided views, guarded outputs."""

from typing import Any

import pytest
import torch
from calls import arguments_of, blocks, equal

import polyspec_ext as ps


def per_request(batch: int, device: torch.device) -> dict[str, torch.Tensor]:
    index = torch.arange(batch, device=device)
    return {
        "temperature": 0.6 + 0.05 * (index % 7),
        "top_k": index % 5 * 20,
        "top_p": 1.0 - 0.02 * (index % 4),
        "min_p": 0.01 * (index % 3),
        "seed": index * 7919 - 3,
        "position": index + 100,
        "round": index % 6,
    }


def block(*sizes: int, device: torch.device) -> dict[str, Any]:
    made = blocks(*sizes, device=device)
    del made["draft_statistics"], made["seed"]
    return made


@pytest.mark.parametrize("tensors", [False, True])
def test_opcheck_sample(tensors: bool, device: torch.device) -> None:
    logits = torch.randn(3, 50, device=device)
    options: Any = per_request(3, device) if tensors else {"temperature": 0.7, "seed": 2**64 - 1}
    operator = torch.ops.polyspec.sample.default
    (arguments,) = arguments_of(operator, lambda: ps.sample(logits, **options))
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_opcheck_verify(rule: str, deterministic: bool, device: torch.device) -> None:
    # Fully accepted blocks: opcheck compares outputs, and the padding of logprobs is NaN.
    logits = torch.randn(3, 3, 50, device=device)
    logits[..., 40:] = -torch.inf
    options: Any = {"target_logits": logits, "rule": rule, "draft_tokens": logits.argmax(-1)[:, :2]}
    if deterministic:
        options["temperature"] = 0.0
    else:
        options |= {"draft_logits": logits[:, :2, :40], **per_request(3, device)}
        options["draft_lengths"] = torch.tensor([2, 2, 2], device=device)
        options["target_to_draft"] = torch.arange(50, device=device) % 40
    operator = torch.ops.polyspec.verify.default
    (arguments,) = arguments_of(operator, lambda: ps.verify(**options))
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic: bool, device: torch.device) -> None:
    def round_(options: dict[str, torch.Tensor], seed: torch.Tensor) -> Any:
        r = ps.verify(**options, temperature=0.8, top_p=0.95, seed=seed, rule="block")
        s = ps.sample(options["target_logits"][:, 0], top_k=10, seed=seed, level=3)
        return r.tokens, r.num_accepted, r.logprobs, r.status, s.tokens + 1

    torch._dynamo.reset()
    compiled = torch.compile(round_, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (3, 5):
        options = block(batch, 2, 50, 40, device=device)
        seed = torch.arange(batch, device=device) - 2
        assert equal(compiled(options, seed), round_(options, seed))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_scalars_are_parameters_of_every_request(rule: str, device: torch.device) -> None:
    options: dict[str, Any] = {**block(37, 4, 1000, 900, device=device), **per_request(37, device)}
    together = ps.verify(**options, rule=rule)
    assert 0 < int(together.num_accepted.sum()) < 37 * 4
    for i in range(37):
        scalars = {n: v[i].item() for n, v in per_request(37, device).items()}
        scalars["seed"] %= 2**64
        tensors = {n: v[i : i + 1] for n, v in options.items() if n not in scalars}
        alone = ps.verify(**tensors, **scalars, rule=rule)
        assert equal(alone, [t[i : i + 1] for t in together]), f"request {i}"


def test_strided_views(device: torch.device) -> None:
    options: dict[str, Any] = block(4, 3, 77, 60, device=device)
    tokens = options.pop("draft_tokens")
    expected = ps.verify(**options, draft_tokens=tokens, seed=9)
    wide = torch.full((4, 9), -7, device=device)
    wide[:, 2:5] = tokens
    for view in (wide[:, 2:5], tokens.T.contiguous().T, tokens.int()):
        assert equal(ps.verify(**options, draft_tokens=view, seed=9), expected)


def test_strided_parameters(device: torch.device) -> None:
    logits = torch.randn(6, 40, device=device)
    whole = {n: v.repeat_interleave(2) for n, v in per_request(6, device).items()}
    sparse = {n: v[::2] for n, v in whole.items()}
    packed = {n: v.contiguous() for n, v in sparse.items()}
    assert not sparse["seed"].is_contiguous()
    assert equal(ps.sample(logits, **sparse), ps.sample(logits, **packed))


def test_seed_is_64_bits(device: torch.device) -> None:
    logits = torch.zeros(1, 2**16, device=device)

    def token(seed: Any) -> int:
        return int(ps.sample(logits, seed=seed).tokens)

    high = 2**64 - 5
    assert token(high) == token(torch.tensor([-5], device=device))
    assert token(high) == token(torch.tensor([high], dtype=torch.uint64, device=device))
    assert len({token(1), token(1 + 2**32), token(1 + 2**63), token(high)}) == 4
