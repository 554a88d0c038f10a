"""Break the engine's source in one place at a time, and see which tests notice.

Our own driver, for one reason: the usual ones start an interpreter for each mutant, and here importing what the tests
need takes longer than the tests. Each mutant runs in a fork of a process that has it all; the mutated module is
executed in the place of the real one, in memory, and no file is touched.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import io
import os
import random
import resource
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import click
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
_SLOW = ["--deselect", "tests/test_corpus.py::test_git_agrees_or_the_case_says_why_not"]
# Cheapest first: the first that fails ends it.
TESTS: dict[str, list[str]] = {
    "parse": ["tests/test_parse.py", "tests/test_corpus.py", *_SLOW],
    "plan": ["tests/test_plan.py", "tests/test_corpus.py", *_SLOW, "tests/test_releases.py", "tests/test_exactness.py"],
    "transaction": [
        *("tests/test_transaction.py", "tests/test_exactness.py", "tests/test_bad_input.py"),
        *("tests/test_concurrency.py", "tests/test_faults.py"),
    ],
}
# A mutant that takes longer hangs: seconds of the processor, for a busy machine must not count as a test that fails;
# and by the clock, for one that only waits.
_PATIENCE = 240
_WAITING = 1800.0

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Mutant:
    """One change: the node of that number in the order of the walk becomes its variant of that number."""

    place: int
    number: int
    words: str


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module. Annotations, docstrings and texts for people are left alone."""
    nodes = list(ast.walk(ast.parse(source)))
    typing = [getattr(node, part, None) for node in nodes for part in ("annotation", "returns")]
    skipped = {id(inner) for node in typing if node is not None for inner in ast.walk(node)}
    return [
        Mutant(place, number, f"{getattr(node, 'lineno', 0)}: {_words(node)} -> {_words(variant)}")
        for place, node in enumerate(nodes)
        if id(node) not in skipped
        for number, variant in enumerate(_variants(node))
    ]


def _words(node: ast.AST) -> str:
    return repr(ast.unparse(node)[:90])


def _variants(node: ast.AST) -> list[ast.AST]:
    """What a node may be changed into."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in _COMPARE:
        new.ops[0] = _COMPARE[type(new.ops[0])]()
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return [new.operand]
    elif isinstance(new, ast.BinOp) and isinstance(new.op, (ast.Add, ast.Sub)):
        new.op = ast.Sub() if isinstance(new.op, ast.Add) else ast.Add()
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
    elif isinstance(new, ast.Constant) and isinstance(new.value, int):
        new.value += 1
    elif isinstance(new, ast.IfExp):
        new.test = ast.UnaryOp(ast.Not(), new.test)
    elif isinstance(new, (ast.Raise, ast.AugAssign)) or (isinstance(new, ast.Expr) and isinstance(new.value, ast.Call)):
        return [ast.Pass()]
    elif isinstance(new, (ast.Continue, ast.Break)):
        return [ast.Break() if isinstance(new, ast.Continue) else ast.Continue()]
    else:
        return []
    return [new]


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The module with the one change made."""
    tree = ast.parse(source)
    wanted = list(ast.walk(tree))[mutant.place]
    variant = ast.copy_location(_variants(wanted)[mutant.number], wanted)

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return variant if node is wanted else self.generic_visit(node)

    Change().visit(tree)
    return ast.fix_missing_locations(tree)


def survives(module: ModuleType, source: str, mutant: Mutant, tests: list[str]) -> bool:
    """Whether every test passes with the mutant in the place of the module."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        code = 1
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_CPU, (_PATIENCE, _PATIENCE))
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                exec(compile(mutated(source, mutant), str(module.__file__), "exec"), module.__dict__)
                code = pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests])
        finally:
            os._exit(code)
    os.close(write)
    # The pipe ends with the child; one that hangs is ended, with all that it started.
    ended, _, _ = select.select([read], [], [], _WAITING)
    os.close(read)
    if not ended:
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@click.command()
@click.argument("name", type=click.Choice(sorted(TESTS)))
@click.option("--minutes", default=60.0, show_default=True, help="Stop after so long.")
@click.option("--seed", default=0, show_default=True, help="Of the order in which mutants are tried.")
def main(name: str, minutes: float, seed: int) -> None:
    """Try mutants of the module NAME in a random order until all are tried or the time is over."""
    os.chdir(REPOSITORY)
    module = importlib.import_module(f"patchbundle.{name}")
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    found = mutants(source)
    random.Random(seed).shuffle(found)
    until = time.monotonic() + 60 * minutes
    tried = alive = 0
    for mutant in found:
        if time.monotonic() > until:
            break
        tried += 1
        if survives(module, source, mutant, TESTS[name]):
            alive += 1
            click.echo(f"survives: {name}.py:{mutant.words}")
    click.echo(f"{name}: {len(found)} mutants, {tried} tried, {tried - alive} killed, {alive} survive")


if __name__ == "__main__":
    main()
