"""The public surface: the text of ``help``, the exports of the package, and their signatures.

python python_tests/system/test_surface.py    # writes signatures.txt anew, for review
"""

import enum
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_models import llama
from toy import ToyLevel

import polyspec_ext as ps
from polyspec_ext import drafters

SIGNATURES = Path(__file__).with_name("signatures.txt")


def documented(thing: type) -> set[str]:
    """Return the names that ``help(thing)`` lists as methods and attributes of the class."""
    text = pydoc.plain(pydoc.render_doc(thing))
    names = set(re.findall(r"^ \|  (\w+)(?:\(| = |$)", text, re.MULTILINE))
    return {name for name in names if not name.startswith("_")} - {thing.__name__}


def test_help_of_chain_shows_what_a_user_calls() -> None:
    assert documented(ps.Chain) == {
        "batch", "begin", "chat", "complete", "from_plan", "generate", "generate_text", "planned",
        "requests", "stream", "text_options",
    }  # fmt: skip


def test_every_shipped_drafter_is_public() -> None:
    """Bases of several drafters are in their files."""
    shipped = set()
    for path in Path(drafters.__file__).parent.glob("*.py"):
        module = importlib.import_module(f"polyspec_ext.drafters.{path.stem}")
        shipped |= {k for k in vars(module).values() if inspect.isclass(k) and is_drafter(k)}
    public = {kind for kind in shipped if getattr(ps, kind.__name__, None) is kind}
    assert {ps.DraftModel, ps.PromptLookup, ps.Eagle} <= public
    bases = {"HeadDrafter", "LastStateDrafter", "ProposalDrafter"}
    assert {kind.__name__ for kind in shipped - public} == bases


def is_drafter(kind: type) -> bool:
    """Whether it is a drafter with a constructor, and no contract."""
    drafts = hasattr(kind, "propose") or hasattr(kind, "draft")
    return drafts and not getattr(kind, "_is_protocol", False)


def test_dir_and_completion_show_the_public_names_only() -> None:
    """In a separate process, where nothing but the package has been imported yet."""
    code = """
import rlcompleter
import polyspec_ext as ps
assert set(dir(ps)) == {*ps.__all__, "__version__"}, dir(ps)
complete = rlcompleter.Completer({"ps": ps}).complete
found = [complete("ps.", i) for i in range(len(ps.__all__))]
assert {name.removeprefix("ps.").rstrip("()") for name in found} == set(ps.__all__), found
assert complete("ps.Ch", 0).startswith("ps.Chain("), complete("ps.Ch", 0)
assert dir(ps) == sorted(dir(ps))
assert ps.tiny.LEVELS and set(dir(ps)) == {*ps.__all__, "__version__"}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists_and_is_documented() -> None:
    for name in ps.__all__:
        assert getattr(ps, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Chian'"):
        ps.Chian  # noqa: B018


def model(layers: int, hidden: int = 16, tied: bool = True) -> Any:
    sizes = {"hidden_size": hidden, "intermediate_size": hidden, "num_attention_heads": 2}
    return llama(0, layers, 64, **sizes, tie_word_embeddings=tied)


def test_repr_of_a_chain_names_models_windows_rounds_and_rule() -> None:
    large, small = model(2), model(1).bfloat16()
    chain = ps.Chain(
        [ps.Level(large, name="large"), ps.Level(small, name="small"), ps.PromptLookup()],
        [6, 3],
        rule="block",
    )
    # By hand: the embedding, tied to the head, 64 x 16, and the last norm; then per layer four
    # projections of 16 x 16, three of the MLP's, and two norms.
    sizes = [64 * 16 + 16 + n * (7 * 256 + 32) for n in (2, 1)]
    assert repr(chain).splitlines() == [
        "Chain(",
        f"  large: {sizes[0] / 1000:.1f}K parameters, float32, cpu",
        f"  small: {sizes[1] / 1000:.1f}K parameters, bfloat16, cpu",
        "  prompt lookup: PromptLookup, no model",
        "  window=[6, 3], rounds=[2], rule='block'",
        ")",
    ]
    lines = repr(ps.Chain([large, small])).splitlines()
    assert [line.split(",")[0].split(": ")[1] for line in lines[1:3]] == [
        f"{size / 1000:.1f}K parameters" for size in sizes
    ]
    assert lines[3] == "  window=[4], rounds=[], rule='token'"


def test_repr_counts_the_weights_of_a_4_bit_copy() -> None:
    given = model(1, 64, tied=False)
    lines = repr(ps.Chain([given, ps.quantize_w4(given, 32)])).splitlines()
    size = 2 * 64 * 64 + 64 + 7 * 64 * 64 + 2 * 64  # embedding and head, norms, projections
    assert [line.split(",")[0].split(": ")[1] for line in lines[1:3]] == [
        f"{size / 1000:.1f}K parameters"
    ] * 2


def test_repr_of_a_chain_of_ones_own_levels() -> None:
    level = ToyLevel(8, 1)
    del level.name
    assert repr(ps.Chain([level])).splitlines() == [
        "Chain(",
        "  ToyLevel: ToyLevel, vocabulary of 8, cpu",
        "  window=[], rounds=[], rule='token'",
        ")",
    ]


# Public classes with methods for users. Of the others the rest is between them and the engine.
CALLED = (
    "Chain",
    "Drafter",
    "Level",
    "NGramTable",
    "Plan",
    "PromptLookup",
    "Stream",
    "SuffixMatch",
)


def signature(thing: Any) -> str:
    """With annotations and defaults in the source's words, which are the same in every Python; ""
    of the compiled module's, and of exceptions with the common arguments."""
    try:
        text = str(inspect.signature(thing))
    except ValueError:
        return ""
    text = re.sub(r"ForwardRef\('([^']*)'[^)]*\)", r"\1", text)
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r" at 0x[0-9a-f]+", "", text))


def members(name: str, kind: type) -> Iterator[str]:
    """Return a class, and the members that users call."""
    if issubclass(kind, enum.Enum):
        yield f"{name}: {', '.join(f'{one.name} = {one.value}' for one in kind)}"
        return
    yield f"{name}{signature(kind)}"
    for attribute in dir(kind):
        owner = next((base for base in kind.__mro__ if attribute in vars(base)), object)
        if attribute.startswith("_") or not owner.__module__.startswith("polyspec_ext"):
            continue
        value = vars(owner)[attribute]
        if isinstance(value, classmethod | staticmethod):
            yield f"{name}.{attribute}{signature(value.__func__)}"
        elif name.rpartition(".")[2] in CALLED:
            if isinstance(value, property):
                yield f"{name}.{attribute}"
            elif callable(value):
                yield f"{name}.{attribute}{signature(value)}"


def surface() -> Iterator[str]:
    """A line per public name, and per method and property of a public class."""
    yield from named_lines("ps", ps, ps.__all__)
    yield from named_lines("ps.ops", ps.ops, sorted({*ps.ops.__all__} - {*ps.__all__}))
    yield from named_lines("ps.policies", ps.policies, ps.policies.__all__)
    functions = [
        name
        for name, value in vars(ps.tiny).items()
        if inspect.isfunction(value) and value.__module__ == ps.tiny.__name__ and name[0] != "_"
    ]
    yield from named_lines("ps.tiny", ps.tiny, functions)


def named_lines(prefix: str, module: Any, names: list[str]) -> Iterator[str]:
    for name in sorted(names):
        value = getattr(module, name)
        if isinstance(value, type):
            yield from members(f"{prefix}.{name}", value)
        elif inspect.ismodule(value):
            yield f"{prefix}.{name}: module"
        elif callable(value):
            yield f"{prefix}.{name}{signature(value)}"
        else:
            yield f"{prefix}.{name} = {value!r}"


def test_public_signatures_are_those_on_file() -> None:
    kept = SIGNATURES.read_text(encoding="utf-8").splitlines()
    found = list(surface())
    assert [line for line in kept if line not in found] == [], "gone, or with another signature"
    assert found == kept, "new: python python_tests/system/test_surface.py writes them"


if __name__ == "__main__":
    SIGNATURES.write_text("\n".join(surface()) + "\n", encoding="utf-8")
