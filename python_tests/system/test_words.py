"""The rules for words in CONTRIBUTING.md, as far as they can be counted."""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("polyspec_ext", "benchmarks", "training")
# Docstrings of functions that do not begin with a verb, and of private functions that need none.
# Lower the numbers, never raise them.
WITHOUT_A_VERB = 0
NEEDLESS = 0
NO_VERBS = {
    "a", "all", "an", "another", "any", "as", "at", "by", "each", "every", "for", "from", "how",
    "if", "in", "its", "no", "nothing", "of", "on", "one", "only", "see", "so", "some", "that",
    "the", "those", "under", "up", "what", "when", "where", "whether", "which", "who", "whose",
    "why", "with",
}  # fmt: skip
SHORT = 6  # lines of a private function that needs no docstring
# Pronouns and vague words in docstrings and comments, by files. Lower the numbers.
VAGUE = {
    "behind", "given", "held", "made", "nobody", "ones", "own", "place", "places", "somebody",
    "stand", "stands", "such", "tell", "tells", "those", "told", "what", "whatever", "whoever",
    "whose",
}  # fmt: skip
# A name with an underscore is no such word.
VAGUE_WORDS = {
    "polyspec_ext/**/*.py": 59, "benchmarks/**/*.py": 3, "training/**/*.py": 12,
    "python_tests/**/*.py": 14, "csrc/**/*": 17, "Makefile": 1, ".ci/*": 0,
}  # fmt: skip
C_SOURCES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
# A comment is in the group; literals, which may hold its beginning, are not.
C_COMMENT = re.compile(
    r"""R"\(.*?\)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|(//[^\n]*|/\*.*?\*/)""", re.DOTALL
)


def functions(root: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(root.parent)}:{node.lineno} {node.name}", node


def begins_without_a_verb(node: ast.FunctionDef) -> bool:
    """Judge by the first word, which is no verb where it is a shape, a code name or a stop word."""
    text = ast.get_docstring(node)
    decorators = " ".join(map(ast.unparse, node.decorator_list))
    if text is None or "property" in decorators:
        return False
    word = text.split()[0].rstrip(",;")
    return not word.isalpha() or not word[0].isupper() or word.lower() in NO_VERBS


def says_too_much(node: ast.FunctionDef) -> bool:
    """Find a private function with a docstring longer than it needs."""
    private = node.name.startswith("_") and not node.name.startswith("__")
    if not private or ast.get_docstring(node) is None or len(node.body) == 1:
        return False
    end = node.body[0].end_lineno
    return node.end_lineno - end <= SHORT


def prose(path: Path) -> Iterator[str]:
    """Yield docstrings and comments of Python, comments of C++, and lines that begin with #."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    if path.suffix in C_SOURCES:
        yield from C_COMMENT.findall(text)
        return
    if path.suffix != ".py":
        yield from (line for line in text.splitlines() if line.startswith("#"))
        return
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    yield from (
        ast.get_docstring(n) or "" for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)
    )
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)


@pytest.mark.parametrize("files", VAGUE_WORDS)
def test_vague_words_stay_rare(files: str) -> None:
    found = [word for path in ROOT.glob(files) if path.is_file() for text in prose(path)
             for word in re.findall("[a-z_]+", text.lower()) if word in VAGUE]  # fmt: skip
    assert len(found) <= VAGUE_WORDS[files], Counter(found)


def test_docstrings_begin_with_a_verb() -> None:
    found = [name for root in FOLDERS for name, node in functions(ROOT / root)
             if begins_without_a_verb(node)]  # fmt: skip
    assert len(found) <= WITHOUT_A_VERB, found


def test_short_private_functions_have_no_docstring() -> None:
    found = [name for root in FOLDERS for name, node in functions(ROOT / root)
             if says_too_much(node)]  # fmt: skip
    assert len(found) <= NEEDLESS, found


@pytest.mark.parametrize(
    ("subject", "status"),
    [
        ("levels: load half of a model", 0),
        ("benchmarks, training: leave the package", 0),
        ("Merge branch 'main'", 0),
        ("Load half of a model", 1),
        ("levels: " + "x" * 65, 1),
        ("", 1),
    ],
)
def test_the_hook_refuses_other_subjects(subject: str, status: int, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nWhy.\n")
    hook = ROOT / ".githooks" / "commit-msg"
    assert subprocess.run([hook, message], capture_output=True).returncode == status
