"""Random calls of the operators, recomputed bit for bit; faults stop their request alone."""

import itertools
import mmap
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_rules as reference
import torch
from calls import equal
from reference_rules import ACCEPT, TRY, Distribution, Draw, philox_draws, pick

import polyspec_ext as ps
from polyspec_ext import _C

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RULES = pytest.mark.parametrize("rule", ["token", "block"])
BAD = {torch.nan: ps.Status.NAN, torch.inf: ps.Status.INF, -torch.inf: ps.Status.EMPTY_ROW}
ALL_ONES = 2**64 - 1
Words = np.ndarray[Any, np.dtype[np.uint64]]
VOCABULARIES = (1, 2, 3, 5, 31, 33, 100, 1000, 1025, 2049)
# Too slow for kernels on the host.
LARGE = (1025, 2049) if hasattr(_C, "launches") else (50257, 128256)
HEADERS = Path(__file__).parents[2] / "csrc" / "include" / "polyspec"


def tensor_of(bits: Words) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int64))


def injected(bits: Words) -> Draw:
    """Return K acceptance tests, then the emitted token, as `draws` has them; no tries."""
    return lambda offset, purpose, node=0: (
        None if purpose == TRY else int(bits[offset if purpose == ACCEPT else -1])
    )


def random_row(vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Logits [vocab], float64: plain, tied, with holes, denormal, or as wide as the types go."""
    kind = rng.integers(10)
    row = rng.normal(0, rng.choice([0.01, 0.5, 2, 8]), vocab)
    if kind == 0:
        row = np.rint(row * 2) / 2
    elif kind == 1:
        row[1:][rng.random(vocab - 1) < 0.5] = -np.inf
    elif kind == 2:
        row[1:] = -np.inf
    elif kind == 3:
        row = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    elif kind == 4:
        row *= 1e37
    elif kind == 5:
        row *= 1e-40
    elif kind == 6:
        row = np.exp(rng.normal(0, 40, vocab)) * rng.choice([-1, 1], vocab)
    return row


def lay_out(rows: np.ndarray, dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Rows [B, R, V] in a type, as a view with odd strides of a buffer full of NaN."""
    most = torch.finfo(dtype).max
    values = torch.from_numpy(np.where(rows > -np.inf, np.clip(rows, -most, most), -np.inf))
    pad, head = (int(n) for n in rng.integers(0, 9, 2))
    batch, count, vocab = rows.shape
    across = rng.random() < 0.3
    shape = (count, batch) if across else (batch, count)
    view = torch.full((*shape, head + vocab + pad), torch.nan, dtype=dtype)[
        ..., head : head + vocab
    ]
    view = view.transpose(0, 1) if across else view
    view.copy_(values.to(torch.float32))
    return view


def words_of(allowed: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Pack allowed ids [..., V] into words; bits after the vocabulary mean nothing."""
    vocab = allowed.shape[-1]
    bits = rng.random((*allowed.shape[:-1], -(-vocab // 32) * 32)) < 0.5
    bits[..., :vocab] = allowed
    return torch.from_numpy(np.packbits(bits, -1, "little").view(np.int32))


class Case:
    """Random arguments of ps.verify for up to three requests, and the reference's rows."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        b, k = int(rng.integers(0 if seed % 10 == 0 else 1, 4)), int(rng.integers(0, 6))
        vocab = int(rng.choice(VOCABULARIES)) if seed % 50 else LARGE[seed // 50 % 2]
        draft_vocab = vocab if rng.random() < 0.6 else int(rng.integers(1, vocab + 1))
        filters = rng.random() < 0.7
        self.parameters: dict[str, np.ndarray] = {
            "temperature": rng.choice([0, 1e-45, 1e-30, 0.01, 0.3, 0.7, 1, 1, 1.7, 50, 1e30], b),
            "top_k": rng.choice([0, 0, 1, 2, 7, 50, vocab, vocab + 5, 2**62], b) * filters,
            "top_p": rng.choice([1, 0.9, 0.5, 0.01, 0, 0.9999999, 1e-45], b)
            if filters
            else [1] * b,
            "min_p": rng.choice([0, 0, 0.05, 0.5, 1, 1e-45], b) * filters,
        }
        self.keys = [
            (int(s), int(p), int(r))
            for s, p, r in zip(
                rng.choice(np.array([0, 2**63, 2**64 - 1, 7 << 40], np.uint64), b),
                rng.choice([0, 17, 2**31, 2**40, 2**63 - 20], b),
                rng.choice([0, 5, 2**32 - 1], b),
                strict=True,
            )
        ]
        self.level = int(rng.integers(1, 2**16))
        rows = np.array([random_row(vocab, rng) for _ in range(b * (k + 1))])
        rows = rows.reshape(b, k + 1, vocab)
        self.ids = np.where(np.arange(vocab) < draft_vocab, np.arange(vocab), -1)
        self.mapped = bool(rng.random() < 0.3)
        if self.mapped:
            self.ids[:] = -1
            self.ids[rng.permutation(vocab)[:draft_vocab]] = np.arange(draft_vocab)
        own = np.argsort(np.where(self.ids < 0, vocab, self.ids))[:draft_vocab]
        noise = rng.choice([0, 0.3, 2]) * rng.normal(size=(b, k, draft_vocab))
        above = rows[:, :k, own]
        if rng.random() < 0.1:  # supports that do not meet
            above = np.where(above == above.max(-1, keepdims=True), -np.inf, 0.0)
        if k and b:  # a row of the draft's needs a token of some probability
            above[..., 0] = np.where((above == -np.inf).all(-1), 0.0, above[..., 0])
        self.target = lay_out(rows, DTYPES[rng.integers(3)], rng)
        self.draft = lay_out(above + noise, DTYPES[rng.integers(3)], rng)
        masked = self.target.float().numpy()
        self.masks: torch.Tensor | None = None
        if rng.random() < 0.3:
            allowed = rng.random(rows.shape) < rng.choice([0.3, 0.9])
            allowed[..., 0] |= ~(allowed & (rows > -np.inf)).any(-1)
            self.masks = words_of(allowed, rng)
            masked = np.where(allowed, masked, -np.inf).astype(np.float32)
            self.target[torch.from_numpy(~allowed)] = torch.nan  # harmless where it is forbidden
        self.p = self.distributions(masked)
        self.q = self.distributions(self.draft.float().numpy())
        self.tokens = np.array(
            [
                [
                    own[reference.sample(row, philox_draws(s, at + i, self.level + 1, r))]
                    for i, row in enumerate(rows_)
                ]
                for rows_, (s, at, r) in zip(self.q, self.keys, strict=True)
            ],
            np.int64,
        ).reshape(b, k)
        self.lengths = rng.integers(0, k + 1, b)
        self.bits = rng.integers(0, 2**64, (b, k + 1), np.uint64)
        self.bits[rng.random((b, k + 1)) < 0.1] = 0
        self.bits[rng.random((b, k + 1)) < 0.1] = ALL_ONES

    def distributions(self, logits: np.ndarray) -> list[list[Distribution]]:
        names = ("temperature", "top_k", "top_p", "min_p")
        values = list(zip(*(self.parameters[name] for name in names), strict=True))
        return [
            [reference.distribution(row, t, int(k), p, m) for row in rows]
            for rows, (t, k, p, m) in zip(logits, values, strict=True)
        ]

    def options(self) -> dict[str, Any]:
        """Keyword arguments that ps.sample and ps.verify share."""
        number = dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32)
        seeds, positions, rounds = ([key[i] for key in self.keys] for i in range(3))
        return {
            **{
                name: torch.tensor(np.asarray(value), dtype=number.get(name, torch.int64))
                for name, value in self.parameters.items()
            },
            "seed": torch.from_numpy(np.array(seeds, np.uint64)),
            "position": torch.tensor(positions, dtype=torch.int64),
            "round": torch.tensor(rounds, dtype=torch.int64),
            "level": self.level,
        }

    def draw(self, b: int, given: bool = False) -> reference.Draw:
        if given:
            return injected(self.bits[b])
        seed, position, round_ = self.keys[b]
        return philox_draws(seed, position, self.level, round_)

    def sample(self, **options: Any) -> ps.SampleResult:
        masks = {} if self.masks is None else {"allowed": self.masks[:, 0]}
        return ps.sample(self.target[:, 0], **self.options(), **masks, **options)

    def verify(self, rule: str, deterministic: bool = False, **changes: Any) -> ps.VerifyResult:
        call = {
            "target_logits": self.target,
            "draft_tokens": torch.from_numpy(self.tokens),
            "draft_lengths": torch.from_numpy(self.lengths),
            "allowed": self.masks,
            **self.options(),
        }
        if not deterministic:
            call["draft_logits"] = self.draft
            call["target_to_draft"] = torch.from_numpy(self.ids) if self.mapped else None
        return ps.verify(**{**call, **changes}, rule=rule)


def statistics_of(words: torch.Tensor) -> tuple[float, ...]:
    return int(words[1]), *words.numpy().view(np.float32)[:2].tolist()


def same_bits(got: torch.Tensor, want: list[float]) -> bool:
    return got.numpy().tobytes() == np.array(want, np.float32).tobytes()


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_every_token_is_recomputed(first: int) -> None:
    for seed in range(first, first + 25):
        case = Case(seed)
        k = case.draft.shape[1]
        for given in (False, True):
            draws = tensor_of(case.bits) if given else None
            drawn = case.sample(draws=None if draws is None else draws[:, -1:])
            assert not drawn.status.any(), seed
            for b, (row, *_) in enumerate(case.p):
                token = reference.sample(row, case.draw(b, given))
                assert int(drawn.tokens[b]) == token, (seed, b)
                assert same_bits(drawn.logprobs[b], [row.logprob(token)]), (seed, b)
                assert statistics_of(drawn.statistics[b]) == row[2:5], (seed, b)
            for rule, deterministic in itertools.product(("token", "block"), (False, True)):
                r = case.verify(rule, deterministic, draws=draws)
                for b, p in enumerate(case.p):
                    where = (seed, b, rule, deterministic)
                    assert int(r.status[b]) in (0, int(ps.Status.ZERO_RESIDUAL)), where
                    block = case.tokens[b, : case.lengths[b]].tolist()
                    q, ids = (
                        (None if deterministic else case.q[b]),
                        case.ids if case.mapped else None,
                    )
                    tokens, logprobs = reference.verify(p, block, q, case.draw(b, given), rule, ids)
                    n = len(tokens)
                    assert r.tokens[b].tolist() == tokens + [-1] * (k + 1 - n), where
                    assert int(r.num_accepted[b]) == n - 1, where
                    assert same_bits(r.logprobs[b, :n], logprobs), where
                    assert r.logprobs[b, n:].isnan().all(), where
                    for row, statistics in zip(p, r.statistics[b, :n], strict=False):
                        assert statistics_of(statistics) == row[2:5], where


@RULES
@pytest.mark.parametrize("value", BAD)
def test_a_bad_row_stops_its_request_alone(value: float, rule: str) -> None:
    stopped = 0
    for seed in range(1, 50):
        case = Case(seed)
        rng = case.rng
        if case.masks is not None or not case.lengths.any():
            continue
        b, in_draft = int(rng.choice(np.flatnonzero(case.lengths))), bool(rng.random() < 0.5)
        i = int(rng.integers(case.lengths[b] + (not in_draft)))
        options = {"deterministic": not in_draft and bool(rng.random() < 0.3)}
        options["draws"] = tensor_of(case.bits)
        clean = case.verify(rule, **options)
        bad = (case.draft if in_draft else case.target).clone()
        whole = value == -torch.inf or rng.random() < 0.5
        bad[b, i, slice(None) if whole else int(rng.integers(bad.shape[2]))] = value
        options["draft_logits" if in_draft else "target_logits"] = bad
        got = case.verify(rule, **options)
        others = torch.arange(len(bad)) != b
        assert equal([x[others] for x in got], [x[others] for x in clean]), seed
        greedy = case.parameters["temperature"][b] == 0
        by_token = greedy or rule == "token"
        if value == -torch.inf and not in_draft and int(got.num_accepted[b]) < i:
            continue  # it ends the block (below)
        if (in_draft and greedy) or (
            int(clean.num_accepted[b]) < i and (by_token or not got.status[b])
        ):
            assert equal([x[b] for x in got], [x[b] for x in clean]), seed  # it was not needed
            continue
        stopped += 1
        assert int(got.status[b]) == BAD[value] | (ps.Status.DRAFT_ROW if in_draft else 0), seed
        assert int(got.num_accepted[b]) == i
        stands = i if by_token else 0  # a block verified as a whole has no accepted prefix
        tokens = case.tokens[b, :stands].tolist()
        assert got.tokens[b].tolist() == tokens + [-1] * (bad.shape[1] + in_draft - stands)
        assert got.logprobs[b, :stands].isfinite().all()
        assert got.logprobs[b, stands:].isnan().all()
    assert stopped > 5


@RULES
@pytest.mark.parametrize("at", [1, 2])
def test_a_row_without_a_token_ends_a_block_as_its_length_does(at: int, rule: str) -> None:
    batch, k, vocab = 300, 3, 5
    draft = torch.randn(batch, k, vocab)
    drawn = [ps.sample(draft[:, i], seed=torch.arange(batch), level=2).tokens for i in range(k)]
    call = {"draft_tokens": torch.stack(drawn, 1), "draft_logits": draft, "rule": rule}
    call["target_logits"] = torch.randn(batch, k + 1, vocab)
    call["target_logits"][:, at] = -torch.inf
    got = ps.verify(**call, seed=torch.arange(batch))
    cut = ps.verify(**call, seed=torch.arange(batch), draft_lengths=torch.full((batch,), at))
    assert equal(got, cut)
    assert got.status.unique().tolist() == [0, ps.Status.EMPTY_ROW]


@RULES
def test_expanded_tensors_are_read_as_they_are(rule: str) -> None:
    """Their stride is 0, which the core takes for one that was left out."""
    row, seeds = torch.randn(1, 1, 9), torch.arange(4)
    rows = row[0].expand(4, 9)
    assert equal(ps.sample(rows, seed=seeds), ps.sample(rows.contiguous(), seed=seeds))
    call = [row.expand(4, 3, 9), torch.tensor([[3]]).expand(4, 2), row.expand(4, 2, 9)]
    whole = [tensor.contiguous() for tensor in call]
    assert equal(ps.verify(*call, seed=seeds, rule=rule), ps.verify(*whole, seed=seeds, rule=rule))


@RULES
def test_a_token_out_of_range_stops_its_request(rule: str) -> None:
    for seed in range(1, 50):
        case = Case(seed)
        rng, vocab = case.rng, case.target.shape[2]
        if not case.lengths.any():
            continue
        b = int(rng.choice(np.flatnonzero(case.lengths)))
        i = int(rng.integers(case.lengths[b]))
        clean = case.verify(rule)
        case.tokens[b, i] = rng.choice([-1, -(2**40), vocab, vocab + 1, 2**31, 2**62])
        got = case.verify(rule)
        if rule == "token" and int(clean.num_accepted[b]) < i:
            assert got.tokens.equal(clean.tokens), seed
            continue
        assert int(got.status[b]) & ps.Status.TOKEN_OUT_OF_RANGE or rule == "block"
        assert (got.tokens < vocab).all()
        assert (got.tokens >= -1).all()
        if rule == "token":
            assert got.num_accepted[b] == i
            assert (got.tokens[b, i:] == -1).all()


@RULES
def test_every_path_of_a_tree_is_recomputed(rule: str) -> None:
    longest, rejected = 0, 0
    for seed in range(150):
        case = Case(seed)
        batch, count, vocab = case.target.shape
        n = count - 1
        if not batch:
            continue
        rng = case.rng
        # Below one node or the other; few at the root, so that paths are long.
        parents = [int(rng.integers(max(-1, i - 3), i)) for i in range(n)]
        drawn = rng.random(count) < 0.7
        own = np.argsort(np.where(case.ids < 0, vocab, case.ids))
        nodes = np.zeros((batch, n), np.int64)
        # Row i of the draft follows row i of the target; after the last there is none.
        for b, (s, at, r) in enumerate(case.keys):
            depths = [0] * count
            for i, parent in enumerate(parents):
                row = parent + 1
                depths[i + 1] = depths[row] + 1
                sibling = parents[:i].count(parent)
                if drawn[row] and row < n:
                    q = case.q[b][row]
                    at_depth = philox_draws(s, at + depths[row], case.level + 1, r)
                    bits = at_depth(0, reference.SAMPLE, sibling)
                    nodes[b, i] = own[reference.pick(q.masses, bits)]
                else:  # distinct
                    nodes[b, i] = (int(case.p[b][row].masses.argmax()) + sibling) % vocab
        if any(
            parents.count(row - 1) > vocab for row in range(count) if not (drawn[row] and row < n)
        ):
            continue
        pool = case.draft.reshape(batch * n, -1) if n else None
        rows = torch.arange(batch)[:, None] * n + torch.arange(count)
        rows = rows.masked_fill(~(torch.from_numpy(drawn) & (torch.arange(count) < n)), -1)
        options = case.options()
        if n:
            options |= {"draft_logits": pool, "draft_rows": rows}
            if case.mapped:
                options["target_to_draft"] = torch.from_numpy(case.ids)
        got = ps.verify_tree(
            case.target,
            torch.from_numpy(nodes),
            torch.tensor(parents, dtype=torch.int64).expand(batch, n),
            depth=n,
            allowed=case.masks,
            rule=rule,
            **options,
        )
        for b, p in enumerate(case.p):
            draft = [case.q[b][i] if i < n and drawn[i] else None for i in range(count)]
            ids = case.ids if case.mapped else None
            tokens, logprobs, path = reference.verify_tree(
                p, nodes[b].tolist(), parents, draft, case.draw(b), ids, rule
            )
            assert int(got.status[b]) in (0, int(ps.Status.ZERO_RESIDUAL)), (seed, b)
            assert int(got.num_accepted[b]) == len(path) == len(tokens) - 1, (seed, b)
            nothing = [-1] * (n - len(path))
            assert got.tokens[b].tolist() == tokens + nothing, (seed, b)
            assert got.path[b].tolist() == path + nothing, (seed, b)
            assert got.rows[b].tolist() == [0, *(node + 1 for node in path), *nothing], (seed, b)
            assert same_bits(got.logprobs[b, : len(tokens)], logprobs), (seed, b)
            longest = max(longest, len(path))
            rejected += n > 0 and not path
    assert longest >= 3
    assert rejected > 20


@RULES
def test_siblings_of_a_tree_are_recomputed(rule: str) -> None:
    """Draw five children from one flat row: later children are accepted as well."""
    rng = np.random.default_rng(0)
    stood = set()
    for seed in range(200):
        p, q = rng.normal(size=(2, 12)).astype(np.float32)
        above, below = (reference.distribution(row) for row in (p, q))
        nodes = [
            reference.pick(below.masses, philox_draws(seed, 0, 2)(0, reference.SAMPLE, i))
            for i in range(5)
        ]
        got = ps.verify_tree(
            torch.from_numpy(np.tile(p, (1, 6, 1))),
            torch.tensor([nodes]),
            torch.full((1, 5), -1),
            draft_logits=torch.from_numpy(q)[None],
            draft_rows=torch.tensor([[0, -1, -1, -1, -1, -1]]),
            depth=1,
            seed=seed,
            position=0,
            level=1,
            rule=rule,
        )
        draft = [below, None, None, None, None, None]
        draw = philox_draws(seed, 0, 1)
        tokens, _, path = reference.verify_tree(
            [above] * 6, nodes, [-1] * 5, draft, draw, None, rule
        )
        assert got.tokens[0, : len(tokens)].tolist() == tokens, seed
        assert got.path[0, : len(path)].tolist() == path, seed
        stood.update(path)
    assert stood == set(range(5))


def test_the_public_headers_say_what_the_reference_does() -> None:
    text = " ".join(re.sub(r"^//", "", line) for line in (HEADERS / "types.hpp").open())
    for coefficient in reference.EXP2[:-1]:
        assert f"{coefficient}," in text
    assert "1.4426950408889634" in text
    drawing = (HEADERS / "sample.hpp").read_text()
    for constant in ("1.4142135623730951", "0.6931471805599453"):
        assert constant in drawing


# ---- mistakes that other systems shipped ---------------------------------------------------------

# Recomputed tokens show as well: u <= p/q at u = 0 (SGLang 35771), filters of one side alone (vLLM
# 42744, transformers 47932), one uniform for two purposes (vLLM 54282), one seed for all requests
# (FlashInfer 4861, vLLM 6038), a request that depends on its batch (vLLM 52522), tokens of NaN rows
# (vLLM 53029), target ids that index a draft's row (xLLM 2175), vectors past a row's end, ties that
# a kernel breaks (llama.cpp 25618).
MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on


@pytest.mark.parametrize("ratio", [0.9, 0.5, 1.0])
def test_a_long_block_ends_where_the_rule_says(ratio: float) -> None:
    """Rows with equal distributions end no prefix, however many of them precede the last draw."""
    length, vocab, batch = 24, 16, 60
    random = np.random.default_rng(int(100 * ratio))
    target = np.repeat(random.normal(0, 2, (batch, 1, vocab)), length + 1, 1).astype(np.float32)
    target[::2, 1::5] += random.normal(0, 1, (vocab,)).astype(np.float32)
    draft = target[:, :-1].copy()
    tokens = random.integers(vocab, size=(batch, length))
    draft[np.arange(batch), 0, tokens[:, 0]] -= np.log(ratio, dtype=np.float32)  # p/q is about it
    draft[::3, 12] = random.normal(0, 2, vocab)
    got = ps.verify(
        *map(torch.from_numpy, (target, tokens, draft)), seed=torch.arange(batch), rule="block"
    )
    for b in range(batch):
        p, q = ([reference.distribution(row) for row in rows[b]] for rows in (target, draft))
        want, _ = reference.verify(p, tokens[b].tolist(), q, philox_draws(b, 0), "block")
        assert got.tokens[b, : len(want)].tolist() == want
        assert got.num_accepted[b] == len(want) - 1


@RULES
def test_zero_residual(rule: str) -> None:
    # FlashInfer emitted uninitialised memory, transformers NaN: p ~ q, and u rounds to 1.
    vocab = 1000
    target = torch.zeros(1, 2, vocab)
    target[..., 7] = -20.0
    draft = target[:, :1].clone()
    draft[..., 7] = -20.0 + 1e-4  # a token of probability 2e-12: the residual rounds to nothing
    for last in (0, 2**63, ALL_ONES):
        draws = tensor_of(np.asarray([[ALL_ONES, last]], dtype=np.uint64))
        got = ps.verify(target, torch.tensor([[7]]), draft, rule=rule, draws=draws)
        assert got.num_accepted.item() == 0
        assert got.status.item() == ps.Status.ZERO_RESIDUAL
        distribution = reference.distribution(target[0, 0].numpy())
        assert got.tokens.tolist() == [[pick(distribution.masses, last), -1]]
        assert got.logprobs[0, 0].isfinite()


def sparse(elements: int) -> torch.Tensor:
    """Return a float16 tensor of zeros; its pages cost nothing until they are written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags), dtype=torch.float16)


@pytest.mark.skipif(sys.platform != "linux", reason="needs unreserved memory")
@pytest.mark.parametrize("stride", [2**31 + 3, 2**32 + 5])
def test_offsets_past_32_bits(stride: int) -> None:
    # Everybody: B * (K + 1) * V >= 2^32 wraps. The rows lie one stride apart and differ, so an
    # offset that wraps finds another token.
    vocab = 33
    memory = sparse(2 * stride + vocab)
    for i, token in enumerate((10, 20, 30)):
        memory[i * stride + token] = 40.0
    by_request = memory.as_strided((3, vocab), (stride, 1))
    assert ps.sample(by_request).tokens.tolist() == [10, 20, 30]
    by_row = memory.as_strided((1, 3, vocab), (0, stride, 1))
    drafts = torch.tensor([[10, 20]])
    got = ps.verify(by_row, drafts, by_row[:, :2])
    assert got.tokens.tolist() == [[10, 20, 30]]
    got = ps.verify(by_row, drafts, None, rule="block", temperature=0.0)
    assert got.tokens.tolist() == [[10, 20, 30]]
    requests = by_request[:, None]
    got = ps.verify(requests.expand(3, 2, vocab), torch.tensor([[10], [20], [30]]), requests)
    assert got.tokens.tolist() == [[10, 10], [20, 20], [30, 30]]
