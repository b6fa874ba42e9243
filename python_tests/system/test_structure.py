"""Imports of the package form no cycle, and no module uses another's private names.

The sources are read, not imported, so imports under TYPE_CHECKING and inside functions count.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import polyspec_ext
from polyspec_ext import rooms, tiny

ROOT = Path(polyspec_ext.__file__).parent

# Folders, and modules that lie in none, from the ground up. Each imports from earlier rows only,
# and from the root not at all.
LAYERS = (
    {"errors", "files", "progress", "rooms"},
    {"stats"},
    {"arguments", "columns", "processor"},
    {"sampling"},
    {"grammar"},
    {"ops", "policies", "rules"},
    {"tensors"},
    {"kv_cache"},
    {"levels"},
    {"quantization"},
    {"drafters"},
    {"inputs"},
    {"runtime"},
    {"outputs"},
    {"chat"},
    {"chain"},
    {"integrations", "planning"},
    {"serving"},
    {"tiny"},
    {"cli"},
    {"__main__"},
)
# The table of rooms imports them at the first use of a name.
AT_FIRST_USE = "polyspec_ext.rooms"

# Public names with an underscore: methods of named tuples, the extension module, torch's names.
PUBLIC = {
    "_asdict", "_fields", "_make", "_replace",  # typing.NamedTuple
    "_C",  # the compiled module
    "_forward_hooks", "_forward_pre_hooks", "_modules",  # torch.nn.Module
    "_schema",  # torch.ops
    "_version",  # torch.Tensor
}  # fmt: skip
LIBRARIES = ("torch", "transformers")


def sources(root: Path, package: str) -> dict[str, ast.Module]:
    """Modules by name; a package has the name of its folder."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [package, *path.relative_to(root).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(name: str, tree: ast.Module, modules: Mapping[str, object], package: bool) -> set[str]:
    """The modules that module `name` imports, of `modules`. An import of a name out of a package is
    one of the package unless the name is a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".")[: len(name.split(".")) - node.level + package]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                compiled = alias.name == "_C"
                found.add(inner if inner in modules or compiled else base)
    # (The compiled module has no source here and imports nothing.)
    return {one for one in found if one in modules} - {name, f"{name.split('.')[0]}._C"}


def graph_of_the_package() -> dict[str, set[str]]:
    """Return the imports of the package but for `AT_FIRST_USE`."""
    trees = sources(ROOT, "polyspec_ext")
    folders = {
        ".".join(["polyspec_ext", *path.parent.relative_to(ROOT).parts])
        for path in ROOT.rglob("__init__.py")
    }
    graph = {name: imports(name, tree, trees, name in folders) for name, tree in trees.items()}
    return {**graph, AT_FIRST_USE: set()}


def folded(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Of the folders, and of the modules that lie in none."""

    def folder(name: str) -> str:
        return ".".join(name.split(".")[:2])

    found: dict[str, set[str]] = {folder(name): set() for name in graph}
    for name, others in graph.items():
        found[folder(name)] |= {folder(other) for other in others} - {folder(name)}
    return found


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def _defined(tree: ast.Module) -> set[str]:
    """Names that a file binds itself: functions, classes, variables, attributes of its objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # __slots__
    return found


def foreign_private_names(tree: ast.Module) -> Iterator[str]:
    """Private names of other modules: imported, or attributes that the file does not define."""
    own = _defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            inside = node.level > 0 or (node.module or "").split(".")[0] == "polyspec_ext"
            for alias in node.names:
                if _private(alias.name) and inside:
                    yield alias.name
        elif isinstance(node, ast.Attribute) and _private(node.attr) and node.attr not in own:
            # Names that a base class has under `self` are the class's.
            owner = ast.unparse(node.value)
            if owner in ("self", "cls", "super()") or owner.split(".")[0] in LIBRARIES:
                continue
            yield node.attr


def test_imports_form_no_cycle() -> None:
    assert list(TopologicalSorter(graph_of_the_package()).static_order())


def upward(graph: Mapping[str, set[str]], layers: Sequence[set[str]]) -> set[tuple[str, str]]:
    """Return imports, by folder, from later layers; "" is the root."""
    floor = {name: number for number, row in enumerate(layers) for name in row}
    found = set()
    for name, others in folded(graph).items():
        own = name.partition(".")[2]
        for other in (one.partition(".")[2] for one in others):
            if own and not floor.get(other, len(layers)) < floor[own]:
                found.add((own, other))
    return found


def test_folders_import_from_lower_layers_only() -> None:
    graph = graph_of_the_package()
    listed = [name for row in LAYERS for name in row]
    assert sorted(listed) == sorted({name.split(".")[1] for name in graph if "." in name})
    assert not upward(graph, LAYERS)


# ---- the core and the rooms ----------------------------------------------------------------------

# Parts that a three-level chain of models does not need, from below: modules, and packages with a
# star. All other modules are the core. A room may use the core and the rooms above it in this list.
ROOMS = {
    "files": {"files"},
    "tables": {"columns"},
    "hidden states": {"levels.states"},
    "users' levels": {"levels.users"},
    "captured graphs": {"runtime.graphs"},
    "texts and chats": {"chat"},
    "grammar and rules": {"grammar", "rules", "runtime.forced"},
    "rows that join": {"runtime.joining", "runtime.prefixes"},
    "policies": {"policies.adaptive"},
    "streaming drafts": {"kv_cache.streaming"},
    "GGUF": {"levels.gguf"},
    "hybrids": {"levels.stateful"},
    "encoder-decoder": {"levels.encoder_decoder"},
    "shared caches and copies": {"levels.shared_cache", "quantization.*"},
    "trees": {"drafters.trees", "ops.trees", "runtime.trees"},
    "heads": {f"drafters.{name}" for name in (
        "checkpoint", "dflash", "eagle", "features", "heads", "mtp"
    )},
    "translated vocabularies": {"drafters.translated"},
    "words": {"drafters.words"},
    "switching": {"drafters.switching"},
    "planning": {"planning.*", "processor"},
    "transformers": {"integrations", "integrations.processors", "integrations.transformers"},
    "serving": {"integrations.prometheus", "serving.*"},
    "vLLM": {"integrations.draft_chain", "integrations.vllm.*"},
    "command line": {"__main__", "cli.*", "tiny.*"},
}  # fmt: skip
# The table of public names imports a module at the first use of a name.
PUBLIC_NAMES = {"polyspec_ext"}


def room_of(module: str) -> str | None:
    """Return the room of a module; None: the core."""
    name = module.removeprefix("polyspec_ext.")
    for room, modules in ROOMS.items():
        packages = (one.removesuffix(".*") for one in modules if one.endswith(".*"))
        if name in modules or any(f"{name}.".startswith(f"{package}.") for package in packages):
            return room
    return None


def test_the_core_names_no_room() -> None:
    graph = graph_of_the_package()
    found = {
        (module, other)
        for module, others in graph.items()
        for other in others
        if room_of(module) is None and room_of(other) is not None and module not in PUBLIC_NAMES
    }
    assert found == set()
    assert all(room_of(f"polyspec_ext.{module}") for module in rooms.NAMES.values())


def test_rooms_use_rooms_below_alone() -> None:
    floor = {room: number for number, room in enumerate(ROOMS)}
    found = {
        (module, other)
        for module, others in graph_of_the_package().items()
        for other in others
        if (room := room_of(module)) and (below := room_of(other)) and floor[below] > floor[room]
    }
    assert found == set()


def without_rooms(folder: Path, gone: set[str]) -> None:
    """Copy the package to `folder` without the rooms `gone`."""
    for path in ROOT.rglob("*"):
        name = ".".join(["polyspec_ext", *path.relative_to(ROOT).with_suffix("").parts])
        room = room_of(name.removesuffix(".__init__"))
        if path.suffix in (".py", ".so") and room not in gone:
            into = folder / "polyspec_ext" / path.relative_to(ROOT)
            into.parent.mkdir(parents=True, exist_ok=True)
            into.symlink_to(path)


_ALONE = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
import polyspec_ext
levels = [f"{sys.argv[1]}/tiny/{name}" for name in ("target", "middle", "drafter")]
chain = polyspec_ext.Chain(levels, window=[5, 3])
options = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
for sampling in ({}, options):
    print(chain.generate([[1, 2, 3], [4]], 8, **sampling).new_tokens)
"""


def run_without(folder: Path, gone: set[str]) -> str:
    """Import the remaining modules, and generate with three levels; return the tokens."""
    without_rooms(folder, gone)
    left = [m for m in sources(ROOT, "polyspec_ext") if room_of(m) not in gone]
    extras = ("polyspec_ext.__main__", "polyspec_ext.serving.api")  # which runs, and needs packages
    left = [m for m in left if m not in extras and ".vllm" not in m]
    words = [sys.executable, "-c", _ALONE, str(ROOT), *left]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout


def test_the_core_runs_alone(tmp_path: Path) -> None:
    """And generates the tokens that it generates with all rooms."""
    script = [sys.executable, "-c", _ALONE, str(ROOT)]
    whole = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert run_without(tmp_path, set(ROOMS)) == whole.stdout


# Tests of promises of the core that need no room.
CORE_TESTS = ("kv_cache/test_rollback.py", "runtime/test_batches.py")


def test_the_tests_of_the_core_pass_alone(tmp_path: Path) -> None:
    """But for users' levels, by which they run."""
    without_rooms(tmp_path, set(ROOMS) - {"users' levels"})
    tests = ROOT.parent / "python_tests"
    for path in ("conftest.py", "slow.txt", *CORE_TESTS):
        into = tmp_path / "python_tests" / path
        into.parent.mkdir(parents=True, exist_ok=True)
        into.write_bytes((tests / path).read_bytes())
    (tmp_path / "python_tests/support").symlink_to(tests / "support")
    (tmp_path / "pyproject.toml").symlink_to(ROOT.parent / "pyproject.toml")
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "python_tests"]
    # Without the rooms of captured graphs (sync_each_step=False), policies and trees.
    words += ["-k", "not False and not it_drafts_for and not paths_move"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]
    assert " passed" in done.stdout


def rooms_that_need(room: str) -> set[str]:
    """Return a room, and all rooms that import it or one of these."""
    graph = graph_of_the_package()
    needed = {room}
    for name in ROOMS:  # from below
        others = {room_of(o) for m, others in graph.items() if room_of(m) == name for o in others}
        if needed & others:
            needed.add(name)
    return needed


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_can_be_deleted(room: str, tmp_path: Path) -> None:
    assert run_without(tmp_path, rooms_that_need(room))


# ---- sizes ---------------------------------------------------------------------------------------

REPOSITORY = ROOT.parent
# The most lines and files of Python in a folder. Lower them with every step, never raise them.
BUDGETS = {
    "polyspec_ext": (31_782, 97),
    "polyspec_ext/integrations/vllm": (972, 4),
    "benchmarks": (5_513, 21),
    "training": (1_496, 7),
    "python_tests": (37_597, 187),
}


@pytest.mark.parametrize("folder", BUDGETS)
def test_folders_keep_their_budget(folder: str) -> None:
    files = list((REPOSITORY / folder).rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    most_lines, most_files = BUDGETS[folder]
    assert 0 < lines <= most_lines
    assert 0 < len(files) <= most_files


# Lines and files of the core, which only fall as well.
CORE_BUDGET = (11_992, 38)
# Functions of the core have at most so many lines without their docstrings, and branches.
LONGEST, MOST_BRANCHES = 60, 15
BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension,
    ast.BoolOp, ast.match_case,
)  # fmt: skip


def test_the_core_keeps_its_budget() -> None:
    core = [module for module in sources(ROOT, "polyspec_ext") if room_of(module) is None]
    assert (lines_of(core), len(core)) <= CORE_BUDGET
    assert len(core) <= CORE_BUDGET[1]


def test_functions_of_the_core_are_short() -> None:
    found = set()
    for module, tree in sources(ROOT, "polyspec_ext").items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or room_of(module):
                continue
            (first, *_), last = node.body, node.end_lineno or 0
            lines = last - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (first.end_lineno or 0) - first.lineno + 1
            branches = sum(isinstance(inner, BRANCHES) for inner in ast.walk(node))
            if lines > LONGEST or branches > MOST_BRANCHES:
                found.add(f"{module.removeprefix('polyspec_ext.')}.{node.name}")
    assert not found


def calls_of(run: Callable[[], object]) -> tuple[int, int]:
    """Count the calls of the package's functions, and the calls that enter another file."""
    files: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(files), 1 + sum(a != b for a, b in itertools.pairwise(files))


@pytest.mark.parametrize(
    ("levels", "window", "most"),
    [
        (("target", "middle", "drafter"), [5, 3], (116, 78)),
        (("target", "eagle3"), None, (195, 122)),
    ],
    ids=["three levels", "eagle"],
)
def test_a_round_makes_few_calls(levels, window, most) -> None:
    """Lower the numbers with every step, never raise them."""
    chain = polyspec_ext.Chain([tiny.path(name) for name in levels], window=window)
    ids = [tiny.tokenizer()("Tom has 3 bags of 8 apples. How many in all?").input_ids]
    batch = chain.batch(ids, max_new_tokens=64)
    batch.advance()
    batch.advance()
    calls, crossings = calls_of(batch.advance)
    assert 0 < calls <= most[0]
    assert 0 < crossings <= most[1]


_LOADED = """
import contextlib, sys
from polyspec_ext.cli import main
with contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(*sys.modules)
"""


_CHAIN = """
import sys
import polyspec_ext
levels = [f"{polyspec_ext.__path__[0]}/tiny/{name}" for name in ("target", "middle", "drafter")]
polyspec_ext.Chain(levels).generate([1, 2, 3], 8)
print(*sys.modules)
"""


def loaded(*words: str, script: str = _LOADED) -> tuple[set[str], int]:
    """Return the modules that a command or script imports, and the lines of the package's."""
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=True
    )
    names = set(done.stdout.splitlines()[-1].split())
    return names, lines_of(names & sources(ROOT, "polyspec_ext").keys())


def lines_of(modules: Iterable[str]) -> int:
    files = [ROOT.parent.joinpath(*name.split(".")) for name in modules]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in files]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def test_names_of_the_compiled_part_come_after_torch() -> None:
    """torch loads its libraries; `from polyspec_ext import _C` imports torch itself."""
    for path in ROOT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found = re.search(r"^from \.+_C import", text, re.M)
        before = r"^(import torch|from \.+ import arguments)$"
        assert found is None or re.search(before, text[: found.start()], re.M), path


@pytest.mark.parametrize("words", ["--help", "serve --help", "--version", "plan --wrong"])
def test_help_and_errors_import_no_torch(words: str) -> None:
    names, lines = loaded(*words.split())
    assert not {"torch", "transformers", "asyncio"} & names
    assert 0 < lines <= 1_500


def test_a_chain_imports_no_more_than_it_did() -> None:
    """Lower the number with every step, never raise it."""
    names, lines = loaded("generate", "2 + 2 =", "--max-new-tokens", "2")
    assert "polyspec_ext.chain" in names
    assert not {"polyspec_ext.planning", "polyspec_ext.integrations"} & names
    assert lines <= 13_733
    names, lines = loaded(script=_CHAIN)
    assert not {"polyspec_ext.cli", "polyspec_ext.tiny"} & names
    assert lines <= 11_981


@pytest.mark.parametrize("folder", ["benchmarks", "training"])
def test_the_package_imports_nothing_that_builds_on_it(folder: str) -> None:
    of_it = re.compile(rf"^ *(from|import) {folder}\b", re.M)
    found = [path for path in ROOT.rglob("*.py") if of_it.search(path.read_text(encoding="utf-8"))]
    assert not found


@pytest.mark.parametrize("folder", ["polyspec_ext", "benchmarks", "training"])
def test_private_names_stay_in_their_file(folder: str) -> None:
    found = {
        (module, name)
        for module, tree in sources(REPOSITORY / folder, folder).items()
        for name in foreign_private_names(tree)
    }
    assert not found
