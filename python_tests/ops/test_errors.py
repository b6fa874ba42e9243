"""Wrong kind, dtype, shape, stride, device, range, mismatch: a typed error naming both sides."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyspec_ext as ps
from polyspec_ext import _C, errors
from polyspec_ext.ops import verification

B, K, V, VD = 3, 2, 11, 7


def sample_arguments() -> dict[str, Any]:
    return {"logits": torch.randn(B, V)}


def verify_arguments() -> dict[str, Any]:
    return {
        "target_logits": torch.randn(B, K + 1, V),
        "draft_tokens": torch.zeros(B, K, dtype=torch.int64),
        "draft_logits": torch.randn(B, K, VD),
    }


meta = torch.device("meta")
# argument, a wrong value, the error, a part of its text: expected, then received
SHARED = [
    ("temperature", -0.5, ValueError, ["finite number >= 0", "-0.5"]),
    ("temperature", float("nan"), ValueError, ["finite number >= 0", "nan"]),
    ("temperature", float("inf"), ValueError, ["finite number >= 0", "inf"]),
    ("temperature", 3e38, ValueError, ["at most 1.329e+36", "3e+38"]),
    ("temperature", "hot", TypeError, ["a number", "str"]),
    ("temperature", True, TypeError, ["a number", "bool"]),
    ("temperature", None, TypeError, ["a number", "NoneType"]),
    ("temperature", [1.0] * B, TypeError, ["a number", "list"]),
    ("temperature", torch.ones(B, dtype=torch.int64), TypeError, ["floating-point", "torch.int64"]),
    ("temperature", torch.ones(B + 1), ValueError, [f"[{B}]", f"[{B + 1}]"]),
    ("temperature", torch.ones(B, 1), ValueError, [f"[{B}]", f"[{B}, 1]"]),
    ("temperature", torch.tensor(1.0), ValueError, [f"[{B}]", "[]"]),
    ("temperature", torch.ones(B, device=meta), ValueError, ["cpu", "meta"]),
    ("top_k", -1, ValueError, ["integer in [0, ", "-1"]),
    ("top_k", 2**63, ValueError, ["integer in [0, ", str(2**63)]),
    ("top_k", 1.5, TypeError, ["an integer", "float"]),
    ("top_k", True, TypeError, ["an integer", "bool"]),
    ("top_k", torch.ones(B), TypeError, ["an integer", "torch.float32"]),
    ("top_k", torch.ones(B, dtype=torch.bool), TypeError, ["an integer", "torch.bool"]),
    ("top_k", torch.ones(2, dtype=torch.int64), ValueError, [f"[{B}]", "[2]"]),
    ("top_p", 1.1, ValueError, ["number in [0, 1]", "1.1"]),
    ("top_p", -0.1, ValueError, ["number in [0, 1]", "-0.1"]),
    ("top_p", float("nan"), ValueError, ["number in [0, 1]", "nan"]),
    ("min_p", 1.1, ValueError, ["number in [0, 1]", "1.1"]),
    ("min_p", -0.1, ValueError, ["number in [0, 1]", "-0.1"]),
    ("seed", -1, ValueError, ["integer in [0, ", "-1"]),
    ("seed", 2**64, ValueError, ["integer in [0, ", str(2**64)]),
    ("seed", 0.0, TypeError, ["an integer", "float"]),
    ("seed", torch.zeros(B + 1, dtype=torch.int64), ValueError, [f"[{B}]", f"[{B + 1}]"]),
    ("position", -1, ValueError, ["integer in [0, ", "-1"]),
    ("round", -1, ValueError, ["integer in [0, ", "-1"]),
    ("round", 2**32, ValueError, ["integer in [0, ", str(2**32)]),
    ("level", 0, ValueError, ["integer in [1, 65535]", "0"]),
    ("level", 2**16, ValueError, ["integer in [1, 65535]", "65536"]),
    ("level", 1.0, TypeError, ["an integer", "float"]),
    ("level", torch.ones(B, dtype=torch.int64), TypeError, ["an integer", "torch.int64"]),
    ("draws", torch.zeros(B, 9, dtype=torch.int64), ValueError, ["draws", "[3, 9]"]),
    ("draws", torch.zeros(B, 1), TypeError, ["int64", "torch.float32"]),
    ("draws", torch.zeros(B, 1, dtype=torch.int32), TypeError, ["int64", "torch.int32"]),
    ("draws", 0.5, TypeError, ["a tensor", "float"]),
]

SAMPLE = [
    ("logits", torch.randn(V), ValueError, ["[B, V]", f"[{V}]"]),
    ("logits", torch.randn(B, 1, V), ValueError, ["[B, V]", f"[{B}, 1, {V}]"]),
    ("logits", torch.randn(B, 0), ValueError, ["1 <= V", f"[{B}, 0]"]),
    ("logits", torch.randn(V, B).T, ValueError, ["unit stride", "stride 3"]),
    ("logits", torch.randn(B, V).double(), TypeError, ["float16", "torch.float64"]),
    ("logits", torch.zeros(B, V, dtype=torch.int64), TypeError, ["float16", "torch.int64"]),
    ("logits", np.zeros((B, V), np.float32), TypeError, ["tensor", "ndarray"]),
    ("logits", None, TypeError, ["tensor", "NoneType"]),
    ("node", 2**14, ValueError, ["integer in [0, 16383]", "16384"]),
    ("allowed", torch.ones(B, 1, dtype=torch.int64), TypeError, ["torch.int32", "torch.int64"]),
    ("allowed", torch.ones(B, V, dtype=torch.bool), TypeError, ["torch.int32", "torch.bool"]),
    ("allowed", torch.ones(B, 2, dtype=torch.int32), ValueError, ["[3, 1]", "[3, 2]"]),
    ("allowed", [[1]] * B, TypeError, ["a tensor", "list"]),
]

VERIFY = [
    ("target_logits", torch.randn(B, V), ValueError, ["[B, K+1, V]", f"[{B}, {V}]"]),
    ("target_logits", torch.randn(B, 0, V), ValueError, ["K+1 >= 1", f"[{B}, 0, {V}]"]),
    (
        "target_logits",
        torch.randn(B, K + 1, 2 * V)[..., ::2],
        ValueError,
        ["unit stride", "stride 2"],
    ),
    ("target_logits", torch.randn(B, K + 1, V).double(), TypeError, ["float16", "torch.float64"]),
    ("target_logits", torch.randn(B, K + 1, 5), ValueError, ["Vd <= V = 5", str(VD)]),
    ("draft_tokens", torch.zeros(B, K + 1, dtype=torch.int64), ValueError, ["[3, 2]", "[3, 3]"]),
    ("draft_tokens", torch.zeros(B + 1, K, dtype=torch.int64), ValueError, ["[3, 2]", "[4, 2]"]),
    ("draft_tokens", torch.zeros(B, dtype=torch.int64), ValueError, ["[3, 2]", "[3]"]),
    ("draft_tokens", torch.zeros(B, K), TypeError, ["integer", "torch.float32"]),
    ("draft_tokens", [[0, 0]] * B, TypeError, ["a tensor", "list"]),
    (
        "draft_tokens",
        torch.zeros(B, K, dtype=torch.int64, device=meta),
        ValueError,
        ["cpu", "meta"],
    ),
    ("draft_logits", torch.randn(B, K + 1, VD), ValueError, ["[3, 2, Vd]", "[3, 3, 7]"]),
    ("draft_logits", torch.randn(B + 1, K, VD), ValueError, ["[3, 2, Vd]", "[4, 2, 7]"]),
    ("draft_logits", torch.randn(B, VD), ValueError, ["[B, K, Vd]", "[3, 7]"]),
    ("draft_logits", torch.randn(B, K, V + 1), ValueError, ["Vd <= V = 11", "12"]),
    ("draft_logits", torch.randn(B, K, 2 * VD)[..., ::2], ValueError, ["unit stride", "stride 2"]),
    ("draft_logits", torch.randn(B, K, VD).long(), TypeError, ["float16", "torch.int64"]),
    ("draft_logits", torch.randn(B, K, VD, device=meta), ValueError, ["cpu", "meta"]),
    ("draft_lengths", torch.zeros(B + 1, dtype=torch.int64), ValueError, ["[3]", "[4]"]),
    ("draft_lengths", torch.zeros(B), TypeError, ["integer", "torch.float32"]),
    ("draft_lengths", 2, TypeError, ["a tensor", "int"]),
    ("draft_statistics", torch.zeros(B, K, dtype=torch.int64), ValueError, ["[3, 2, 2]", "[3, 2]"]),
    ("draft_statistics", torch.zeros(B, K, 2), TypeError, ["int64", "torch.float32"]),
    ("target_to_draft", torch.zeros(V + 1, dtype=torch.int32), ValueError, ["[11]", "[12]"]),
    ("target_to_draft", torch.zeros(V), TypeError, ["integer", "torch.float32"]),
    ("rule", "tokens", ValueError, ["'token' or 'block'", "'tokens'"]),
    ("rule", 0, ValueError, ["'token' or 'block'", "0"]),
]

CASES: list[tuple[Callable[..., Any], Callable[[], dict[str, Any]], Any]] = [
    *((ps.sample, sample_arguments, case) for case in SHARED + SAMPLE),
    *((ps.verify, verify_arguments, case) for case in SHARED + VERIFY),
]


@pytest.mark.parametrize(("function", "arguments", "case"), CASES)
def test_wrong_argument_is_named(function, arguments, case) -> None:
    name, value, error, texts = case
    with pytest.raises(error) as raised:
        function(**{**arguments(), name: value})
    text = str(raised.value)
    for expected in texts:
        assert expected in text, text
    # A vocabulary mismatch has two sides; any other text names the argument itself.
    assert name in text or "Vd <= V" in text, text
    assert type(raised.value) is error


def test_arguments_are_fine_without_the_fault() -> None:
    ps.sample(**sample_arguments())
    ps.verify(**verify_arguments())


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("batch", [0, B])
def test_tensors_without_elements_are_fine_whatever_their_strides(batch: int, k: int) -> None:
    """numpy's empty arrays have strides of 0, an empty ``eos`` has no address."""

    def empty(*shape: int, dtype: Any = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.zeros(shape, dtype))

    options: dict[str, Any] = {
        "temperature": empty(batch),
        "seed": empty(batch, dtype=np.uint64),
        "draws": empty(batch, k + 1, dtype=np.int64),
    }
    target, tokens = empty(batch, k + 1, V), empty(batch, k, dtype=np.int64)
    draft: dict[str, Any] = {
        "draft_logits": empty(batch, k, VD),
        "draft_statistics": empty(batch, k, 2, dtype=np.int64),
        "draft_lengths": empty(batch, dtype=np.int64),
        "target_to_draft": torch.arange(V) % VD,
    }
    for eos in (None, 3, [], [3, 4], empty(2, dtype=np.int64), empty(batch, 2, dtype=np.int64)):
        for rule in ("token", "block"):
            r = ps.verify(target, tokens, **draft, **options, eos=eos, rule=rule)
            assert r.tokens.shape == (batch, k + 1)
            assert not r.status.any()
    logits = empty(batch, V) if batch else torch.from_numpy(np.zeros((0, V), np.float32, "F"))
    options["draws"] = empty(batch, 1, dtype=np.int64)
    assert ps.sample(logits, **options).tokens.shape == (batch,)


@pytest.mark.parametrize("name", ["draft_statistics", "target_to_draft"])
def test_draft_only_arguments_need_draft_logits(name: str) -> None:
    arguments = verify_arguments()
    arguments["draft_logits"] = None
    arguments[name] = torch.zeros(B, K, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{name}: expected None without draft_logits"):
        ps.verify(**arguments)


def test_operators_check_what_memory_safety_needs() -> None:
    """Called past the Python functions, a wrong shape is still refused, not read out of bounds."""
    raw = torch.ops.polyspec.sample.default
    rest = [0, None, 1.0, None, 0.0, None, 0, None, 0, None, 0, None, 0, None, 1, None]
    raw(torch.randn(B, V), 1.0, None, *rest)
    for logits, temperatures in [
        (torch.randn(V), None),
        (torch.randn(V, B).T, None),
        (torch.randn(B, V).double(), None),
        (torch.randn(B, V), torch.ones(B - 1)),
        (torch.randn(B, V), torch.ones(B).long()),
    ]:
        with pytest.raises(RuntimeError):
            raw(logits, 1.0, temperatures, *rest)


def test_cuda_logits_without_kernels_name_the_remedy() -> None:
    """By the text of the stub for the kernels: no tensor is on a device that torch lacks."""
    source = (Path(__file__).parents[2] / "csrc/src/cuda/stub.cpp").read_text()
    [text] = re.findall(r'"(this build of polyspec .*)"', source)
    error = verification.typed(RuntimeError(f"sample, a/b.hpp:1, polyspec: {text}"), "logits", None)
    assert isinstance(error, ps.PolyspecError)
    assert "POLYSPEC_CUDA=1" in str(error)


def test_tensors_of_another_layout() -> None:
    with pytest.raises(ValueError, match=r"^logits: .*strided .*, given a torch.sparse_coo tensor"):
        ps.sample(torch.ones(B, V).to_sparse())


def test_status_names_are_the_librarys() -> None:
    assert _C.status_bits() == {bit.name: int(bit) for bit in ps.Status}


def test_raise_for_status_names_request_level_and_position() -> None:
    logits = torch.randn(B, K + 1, V)
    logits[1, 1, 4] = float("nan")
    tokens = logits.argmax(-1)[:, :K]
    tokens[1, 0] = logits[1, 0].argmax()
    r = ps.verify(logits, tokens, temperature=0.0, position=torch.tensor([10, 20, 30]), level=2)
    assert r.status.tolist()[0] == r.status.tolist()[2] == 0
    with pytest.raises(ps.RequestError) as raised:
        ps.raise_for_status(
            r.status, level=2, position=torch.tensor([10, 20, 30]), num_accepted=r.num_accepted
        )
    error = raised.value
    assert (error.request, error.level, error.position) == (1, 2, 21)
    assert error.status & ps.Status.NAN
    assert "request 1, level 2, position 21: a NaN in a row of logits" in str(error)
    assert isinstance(error, ps.PolyspecError)
    assert isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert (again.request, again.position, str(again)) == (1, 21, str(error))


def test_notes_do_not_raise() -> None:
    status = torch.tensor([0, int(ps.Status.ZERO_RESIDUAL)], dtype=torch.int32)
    ps.raise_for_status(status, level=1, position=0)
    assert errors.describe(int(ps.Status.ZERO_RESIDUAL)) == "ok"
    assert "unknown error bits 0x4000" in errors.describe(1 << 14)
