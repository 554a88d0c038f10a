"""Check that every stand-in still fits its target, by reading the trees. Nothing of the engine is imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from lab.rig.standins.errors import StandInMoved
from lab.rig.standins.table import StandIn, for_version

__all__ = ["check", "definitions", "problems"]

_HERE = Path(__file__).resolve().parent


def _file(module: str, roots: Iterable[str | Path]) -> Path | None:
    """The source of a dotted module in the first root that has its top package."""
    parts = module.split(".")
    for root in roots:
        base = Path(root, *parts)
        for candidate in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a block defines, with the statement, branches of if and try included."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name.partition(".")[0]), node
        elif isinstance(node, ast.If):
            yield from definitions(node.body)
            yield from definitions(node.orelse)
        elif isinstance(node, ast.Try):
            for block in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                yield from definitions(block)


def _find(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Statements that define a dotted name."""
    found: list[ast.stmt] = [tree]  # type: ignore[list-item]
    for part in name.split("."):
        found = [node for outer in found for label, node in definitions(getattr(outer, "body", ())) if label == part]
    return found


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append(arguments.vararg.arg)
    names += [one.arg for one in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append(arguments.kwarg.arg)
    return names


def _library(module: str, roots: list[str | Path]) -> bool:
    """Whether a compiled library of this dotted name lies in one of the roots."""
    *package, name = module.split(".")
    return any(any(Path(root, *package).glob(f"{name}.*so")) for root in roots)


@functools.cache
def _own(source: str) -> ast.Module:
    """One of our modules, parsed."""
    return ast.parse((_HERE / f"{source}.py").read_bytes())


def _problem(entry: StandIn, roots: list[str | Path], parsed: dict[Path, ast.Module]) -> str | None:
    if entry.how == "empty":
        return None if _library(entry.module, roots) else f"{entry.target}: no compiled library {entry.module}"
    source, _, ours = entry.by.partition(":")
    mine = _find(_own(source), ours)
    if not mine:
        return f"{entry.target}: its stand-in {entry.by} does not exist"
    if not entry.readable:
        return None
    path = _file(entry.module, roots)
    if path is None:
        return f"{entry.target}: no module {entry.module}"
    if path not in parsed:
        try:
            parsed[path] = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError) as error:
            return f"{entry.target}: {path} is no Python ({error})"
    theirs = _find(parsed[path], entry.name)
    if entry.how == "add":
        # A module may define it in a branch that is not taken here; its class must be there.
        outer = entry.name.rpartition(".")[0]
        return None if not outer or _find(parsed[path], outer) else f"{entry.target}: no {outer}"
    if not theirs:
        return f"{entry.target} is missing"
    if entry.how == "replace":
        functions = [node for node in theirs if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        own = [node for node in mine if isinstance(node, ast.FunctionDef)]
        if not functions or not own:
            return f"{entry.target} is not a function"
        expected = _parameters(own[-1])
        if all(_parameters(function) != expected for function in functions):
            return f"{entry.target} takes {_parameters(functions[-1])}, its stand-in takes {expected}"
    return None


def problems(version: str, roots: Iterable[str | Path]) -> list[str]:
    """Everything that does not fit, in words; empty if the stand-ins fit.

    Args:
        version: engine version.
        roots: folders in the order of ``sys.path``: an engine tree first if there is one, then site-packages.
    """
    searched = list(roots)
    parsed: dict[Path, ast.Module] = {}
    found = (_problem(entry, searched, parsed) for entry in for_version(version))
    return [one for one in found if one is not None]


def check(version: str, roots: Iterable[str | Path]) -> None:
    """Refuse to go on if a stand-in does not fit.

    Raises:
        StandInMoved: names every target that does not fit.
    """
    found = problems(version, roots)
    if found:
        raise StandInMoved(f"sglang {version}: " + "; ".join(found))
