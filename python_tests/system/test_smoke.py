"""Run a binary with every torch that it is said to run with (`make test-oldest`)."""

import contextlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM

import polyspec_ext as ps
from polyspec_ext import _C, tiny

PROMPTS = [
    "A baker makes 12 trays of 8 rolls and sells 70. How many are left?",
    "Tom has 3 boxes with 15 pens each and gives away 7 pens. How many pens has Tom?",
]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = tiny.tokenizer()
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


@pytest.fixture(scope="module")
def chain() -> ps.Chain:
    return ps.Chain([tiny.path(name) for name in tiny.LEVELS], window=[5, 3], dtype="float32")


def test_this_is_the_binary_that_was_asked_for() -> None:
    """POLYSPEC_EXPECT: "built with, running with, transformers", versions or how they begin."""
    expected = os.environ.get("POLYSPEC_EXPECT")
    if expected is None:
        pytest.skip("POLYSPEC_EXPECT names no versions")
    found = (_C.build_info()["torch"], torch.__version__, transformers.__version__)
    for wanted, version in zip(expected.split(","), found, strict=True):
        assert version.startswith(wanted), (expected, found, Path(_C.__file__))


_IMPORT_ALL = """
import importlib, pkgutil, polyspec_ext
names = [one.name for one in pkgutil.walk_packages(polyspec_ext.__path__, "polyspec_ext.")]
for name in names:
    if not name.endswith("__main__"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(name, error)
"""


def _required(name: str, known: set[str]) -> set[str]:
    """Add a distribution to `known`, and its requirements without extras."""
    if name not in known:
        with contextlib.suppress(metadata.PackageNotFoundError):
            requirements = map(Requirement, metadata.requires(name) or [])
            known.add(name)
            for one in requirements:
                if one.marker is None or one.marker.evaluate({"extra": ""}):
                    _required(one.name, known)
    return known


def test_every_module_imports_without_optional_packages(tmp_path: Path) -> None:
    known: set[str] = set()
    for name in ("torch", "numpy", "transformers"):
        _required(name, known)
    for name in known:
        for file in metadata.files(name) or []:
            link, place = tmp_path / file.parts[0], Path(str(file.locate()))
            if file.parts[0] != ".." and not link.exists():
                link.symlink_to([place, *place.parents][len(file.parts) - 1])
    root = Path(ps.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
    # Without `site` nothing else is found.
    without_site = [sys.executable, "-S"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*without_site, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    assert run("-c", "import pytest").returncode != 0
    imported = run("-c", _IMPORT_ALL)
    assert imported.returncode == 0, imported.stderr
    (endpoint,) = imported.stdout.splitlines()
    assert endpoint.startswith("polyspec_ext.serving.api the endpoint needs Starlette")
    help = run("-m", "polyspec_ext", "plan", "--help")
    assert help.returncode == 0, help.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sample_and_verify(dtype: torch.dtype) -> None:
    draft = torch.randn(3, 4, 1000).to(dtype)
    drafted = [ps.sample(draft[:, i], seed=3, position=i, level=2, top_k=50) for i in range(4)]
    tokens = torch.stack([d.tokens for d in drafted], 1)
    assert torch.equal(
        torch.stack([ps.sample(draft[:, i], temperature=0.0).tokens for i in range(4)], 1),
        draft.float().argmax(-1),
    )
    # A target that drafts for itself accepts everything.
    target = torch.cat([draft, torch.randn(3, 1, 1000).to(dtype)], 1)
    for rule in ("token", "block"):
        result = ps.verify(target, tokens, draft, seed=3, position=0, rule=rule, top_k=50)
        ps.raise_for_status(result.status, level=1, position=0)
        assert result.num_accepted.tolist() == [4, 4, 4]
        assert torch.equal(result.tokens[:, :4], tokens)
    target[1, 0, 7] = float("nan")
    status = ps.verify(target, tokens, draft).status
    with pytest.raises(ps.RequestError):
        ps.raise_for_status(status, level=1, position=0)


def test_errors_of_torchs_interface_arrive_as_exceptions() -> None:
    with pytest.raises(RuntimeError, match=r"state: expected at least .* columns, got 5"):
        torch.ops.polyspec.schedule_next(torch.zeros(3, 5, dtype=torch.int64), 2, 1, 1, 1, 0)


def test_greedy_chain_is_the_targets_text(chain: ps.Chain, prompts: list[list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.path("target"), dtype=torch.float32)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            plain = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        out = chain.generate(ids, max_new_tokens=NEW_TOKENS)
        assert out.sequences[0].tolist() == plain[0].tolist()
        assert out.stats.levels[0].mean_acceptance_length > 1


def test_a_batch_is_its_rows(chain: ps.Chain, prompts: list[list[int]]) -> None:
    arguments = {"max_new_tokens": NEW_TOKENS, "temperature": 0.8, "top_p": 0.9}
    out = chain.generate(prompts, seed=[1, 2], **arguments)
    for row, prompt in enumerate(prompts):
        alone = chain.generate([prompt], seed=[1 + row], **arguments)
        length = len(prompt) + alone.requests[0].num_new_tokens
        assert out.requests[row].num_new_tokens == alone.requests[0].num_new_tokens
        assert out.sequences[row, :length].tolist() == alone.sequences[0, :length].tolist()


def test_custom_generate(prompts: list[list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.path("target"), dtype=torch.float32)
    chain = ps.Chain([model, tiny.path("drafter")])
    ids = torch.tensor(prompts[:1])
    plain = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    out = model.generate(
        ids,
        custom_generate=ps.custom_generate,
        chain=chain,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    assert out.tolist() == plain.tolist()
