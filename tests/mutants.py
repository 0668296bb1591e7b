"""Known bugs of this field, planted one by one; a bug that no test finds is a missing test.

Run: make mutants, or python tests/mutants.py [words of a bug's name]
The bugs are in tests/bugs, one table per room of src. Results go to tests/mutants.json.
"""

import ast
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import bugs
import pytest
import warm

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "trueup"
RESULTS = TESTS / "mutants.json"

# The test folders that search for a bug of a room; all other rooms are searched by all other tests.
BENCHMARK = ("data", "source", "bench", "report")
SEARCHED_BY = {**dict.fromkeys(BENCHMARK, BENCHMARK), "deploy": ("deploy",), "cli": ("cli",)}
LEFT_OUT = {"test_models", "test_architecture"}
LIMIT = 600  # seconds without a finished test, after which a run hangs
LOCAL = threading.local()
SERVERS: list[warm.Server] = []


class Bug(NamedTuple):
    """A change of one place in the source, found by its syntax: layout, comments and file names do not matter."""

    name: str
    place: str
    """`function`, `Class.method` or `Class`, in any module; "" is what a module does outside of these."""
    old: str
    """An expression or statements that occur once in the place; `...` as a statement stands for any statements."""
    new: str
    """What the bug makes of it; "" is `pass`. Its `...` are those of `old`, in order."""
    tests: str = ""
    """Stems of the test files that are likely to find it, run before all others."""


BUGS = [Bug(*row) for row in bugs.ROWS]


class Site(NamedTuple):
    """Nodes in a tree: `getattr(owner, field)`, or a run of it if that is a list."""

    owner: ast.AST
    field: str
    run: slice | None
    kept: list[list[ast.stmt]]

    def nodes(self) -> list[ast.AST]:
        value = getattr(self.owner, self.field)
        return value[self.run] if self.run else [value]

    def replace(self, new: list[ast.AST]) -> None:
        if self.run is None:
            setattr(self.owner, self.field, new[0])
        else:
            getattr(self.owner, self.field)[self.run] = new


def snippets(bug: Bug) -> tuple[list[ast.AST], list[ast.AST]]:
    """Return old and new: one expression each if both are expressions, else statements."""
    old, new = (ast.parse(textwrap.dedent(text) or "pass").body for text in (bug.old, bug.new))
    if [type(s) for s in (*old, *new)] == [ast.Expr, ast.Expr]:
        return [old[0].value], [new[0].value]
    return old, new


def is_gap(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def same(old: object, found: object, kept: list[list[ast.stmt]]) -> bool:
    """Compare syntax without positions; append to `kept` the statements that a gap in `old` stands for."""
    if isinstance(old, list) and isinstance(found, list):
        gap = next((i for i, item in enumerate(old) if is_gap(item)), None)
        if gap is not None and len(found) >= len(old) - 1:
            behind = len(found) - (len(old) - gap - 1)
            kept.append(found[gap:behind])
            old, found = old[:gap] + old[gap + 1 :], found[:gap] + found[behind:]
        return len(old) == len(found) and all(same(a, b, kept) for a, b in zip(old, found, strict=True))
    if isinstance(old, ast.AST) and type(old) is type(found):
        return all(same(value, getattr(found, name, None), kept) for name, value in ast.iter_fields(old))
    return type(old) is type(found) and old == found


def sites(scope: ast.AST, old: list[ast.AST]) -> Iterator[Site]:
    """Find `old` in a part of a tree."""
    parts = scope.body if isinstance(scope, ast.Module) else []
    outside = [part for part in parts if not isinstance(part, ast.FunctionDef | ast.ClassDef)]
    for owner in chain([scope], *map(ast.walk, outside)) if parts else ast.walk(scope):
        for field, value in ast.iter_fields(owner):
            run = isinstance(value, list)
            for start in range(len(value) - len(old) + 1) if run else (0,):
                found = value[start : start + len(old)] if run else [value]
                if type(found[0]) is type(old[0]) and same(old, found, kept := []):
                    yield Site(owner, field, slice(start, start + len(old)) if run else None, kept)


def fill(new: object, kept: list[list[ast.stmt]]) -> None:
    """Put the statements that gaps stood for into the gaps of `new`, in order."""
    if isinstance(new, list):
        gap = next((i for i, item in enumerate(new) if is_gap(item)), None)
        inner = [item for item in new if not is_gap(item)]
        if gap is not None:
            new[gap : gap + 1] = kept.pop(0)
    else:
        inner = [value for _, value in ast.iter_fields(new)] if isinstance(new, ast.AST) else []
    for item in inner:
        fill(item, kept)


def places(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Name all functions and classes of a module, and the module itself."""
    if not prefix:
        yield "", tree
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}".removeprefix(".")
            yield name, node
        if isinstance(node, ast.stmt):
            yield from ((n, found) for n, found in places(node, name) if n)


@cache
def atlas() -> dict[str, list[tuple[Path, ast.AST]]]:
    """Map each place to the files that have it."""
    found: dict[str, list[tuple[Path, ast.AST]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for name, node in places(ast.parse(path.read_text())):
            found.setdefault(name, []).append((path, node))
    return found


def homes(bug: Bug) -> list[Path]:
    """Return the file of each match of a bug; exactly one is right."""
    old, _ = snippets(bug)
    return [path for path, scope in atlas().get(bug.place, []) for _ in sites(scope, old)]


def hinted(bug: Bug) -> list[Path]:
    """Return the test files that a bug names."""
    return [path for stem in bug.tests.split() for path in files_of_tests().get(stem, [])]


@cache
def files_of_tests() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        found.setdefault(path.stem, []).append(path)
    return found


def misfits() -> list[str]:
    """Name the bugs that do not match the source exactly once, or whose test files do not exist."""
    lost = [f"{bug.name} ({found} matches)" for bug in BUGS if (found := len(homes(bug))) != 1]
    return lost + [f"{bug.name} (no {s})" for bug in BUGS for s in bug.tests.split() if s not in files_of_tests()]


def planted(bug: Bug, text: str) -> str:
    """Return the text of a module with the bug in it; all else stays, comments too, which some tests read."""
    old, new = snippets(bug)
    tree = ast.parse(text)
    site = next(site for name, scope in places(tree) if name == bug.place for site in sites(scope, old))
    first, last = site.nodes()[0], site.nodes()[-1]
    fill(new, list(site.kept))
    written = "\n".join(map(ast.unparse, new))
    written = f"({written})" if isinstance(first, ast.expr) else textwrap.indent(written, " " * first.col_offset)
    data = text.encode()  # columns count bytes
    starts = [0, *accumulate(map(len, data.splitlines(keepends=True)))]
    before = data[: starts[first.lineno - 1] + first.col_offset]
    behind = data[starts[last.end_lineno - 1] + last.end_col_offset :]
    result = (before + written.lstrip().encode() + behind).decode()
    site.replace(new)
    if ast.dump(ast.parse(result)) != ast.dump(tree):
        raise ValueError(f"{bug.name}: the text of the place cannot be edited; take in more of what is around it")
    return result


def tests_for(path: Path) -> list[str]:
    """Return the tests that search for a bug of this source file."""
    folders = SEARCHED_BY.get(path.relative_to(SOURCE).parts[0])
    if folders is not None:
        return [str(TESTS / folder) for folder in folders]
    outside = {TESTS / folder for folder in SEARCHED_BY}
    found = [p for ps in files_of_tests().values() for p in ps if p.stem not in LEFT_OUT]
    return sorted(str(p) for p in found if not outside & set(p.parents))


def run(tests: Sequence[str | Path], source: Path) -> str | None:
    """Return the first test that fails on this copy of the source, "timeout", or None if all pass."""
    command = ["-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--no-header"]
    command += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning", *tests]  # by the server
    environment = {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.NamedTemporaryFile("r") as log:
        server = server_of_thread()
        server.start(*command, cwd=TESTS.parent, environment=environment, out=Path(log.name))
        heard = -1
        while not server.ended(LIMIT):
            if (size := os.fstat(log.fileno()).st_size) == heard:
                stop(server)
                server.result()
                return "timeout"
            heard = size
        code = server.result()
        text = log.read()
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.M)
    return found[1] if found else text[-500:]


def server_of_thread() -> warm.Server:
    """Return the process that this thread's runs are forked from: torch and others are imported, trueup is not."""
    if not hasattr(LOCAL, "server"):
        LOCAL.server = warm.Server("-B")
        SERVERS.append(LOCAL.server)
    return LOCAL.server


def stop(server: warm.Server) -> None:
    """End a run and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(server.child, signal.SIGKILL)


def killer(bug: Bug) -> str | None:
    """Return the test that finds the bug; None if it survives all."""
    (home,) = homes(bug)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(SOURCE.parent, source, ignore=shutil.ignore_patterns("__pycache__"))
        (source / home.relative_to(SOURCE.parent)).write_text(planted(bug, home.read_text()))
        likely = [str(path) for path in hinted(bug)]
        return (likely and run(likely, source)) or run(tests_for(home), source)


def timed(bug: Bug) -> tuple[str | None, float]:
    start = time.monotonic()
    return killer(bug), time.monotonic() - start


def record(results: dict[str, tuple[str | None, float]]) -> None:
    """Put new results beside those of other bugs, in the order of the tables."""
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = {row["name"]: row for row in old}
    rows |= {name: {"name": name, "test": test, "seconds": round(s, 1)} for name, (test, s) in results.items()}
    kept = [json.dumps(rows[bug.name]) for bug in BUGS if bug.name in rows]
    RESULTS.write_text("[\n" + ",\n".join(kept) + "\n]\n")


def main() -> None:
    if lost := misfits():
        sys.exit(f"these do not fit the source: {lost}")
    wanted = [bug for bug in BUGS if all(word in bug.name for word in sys.argv[1:])]
    for bug in wanted:
        planted(bug, homes(bug)[0].read_text())  # what cannot be planted shows at once, not after an hour
    if failure := run(hinted(Bug("", "", "", "", "test_losses")), SOURCE.parent):
        sys.exit(f"a run without a bug fails, so nothing would be proved: {failure}")
    results: dict[str, tuple[str | None, float]] = {}
    with ThreadPoolExecutor(2) as pool:
        try:
            for bug, result in zip(wanted, pool.map(timed, wanted), strict=True):
                results[bug.name] = result
                print(f"{bug.name:<60} {result[0] or 'SURVIVES'} ({result[1]:.0f} s)", flush=True)
                record(results)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for server in SERVERS:
                stop(server)
            raise
    alive = sum(test is None for test, _ in results.values())
    print(f"{len(wanted) - alive} killed, {alive} alive")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
