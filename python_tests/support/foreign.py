"""Signatures of other packages, read from their sources: they need not be installed to run."""

import ast
import importlib.util
import os
from pathlib import Path


def sources(package: str) -> Path | None:
    """Return the folder of a package's sources (POLYSPEC_SOURCES, or installed), or None."""
    named = Path(os.environ.get("POLYSPEC_SOURCES", "/nonexistent")) / package
    if named.is_dir():
        return named
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def signature(folder: Path, module: str, name: str) -> str:
    """Return the parameters of a function, a method "Class.name" or the fields of a class, by name
    with spaces between; "" of an assignment. LookupError: the module lacks the name."""
    body: list[ast.stmt] = ast.parse((folder / module).read_text(encoding="utf-8")).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((node for node in reversed(body) if part in _names(node)), None)
        if found is None:
            raise LookupError(f"{module}: expected {name}")
        body = getattr(found, "body", [])
    if isinstance(found, ast.ClassDef):
        fields = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
        return " ".join(field.id for field in fields if isinstance(field, ast.Name))
    if isinstance(found, ast.FunctionDef):
        given = found.args
        return " ".join(one.arg for one in [*given.posonlyargs, *given.args, *given.kwonlyargs])
    return ""


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return set()
