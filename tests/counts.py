"""Counts of the shape of the source: `python tests/counts.py` prints them; tests/test_architecture.py holds the limits.

Private reach-ins are reads or writes of `x._name` outside of the module that defines `_name`, where x is neither self
nor cls and `_name` is ours; torch's own private names do not count.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parent.parent / "src" / "trueup"
FILES = sorted(SOURCE.rglob("*.py"))
# Names that stand for one idea in several places: a verb of the command line and what it calls, a paper's method and
# its rule for guards, the public page of rules and the room behind it, a module of checks and what it checks.
ONE_IDEA = {"compare", "reproduce", "stress", "train", "run", "segment", "unpack", "check", "rules", "state"}
ONE_IDEA |= {"Sar", "Cotta", "Roid", "bench", "report", "data"}


@cache
def trees() -> dict[str, ast.Module]:
    """Parse every file of the source, by its path."""
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in FILES}


def reach_ins() -> list[str]:
    """List private attributes that are used outside of the module that defines them."""
    home: dict[str, set[str]] = defaultdict(set)
    used: list[tuple[str, str, int]] = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and _private(node.name):
                home[node.name].add(path)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _private(node.target.id):
                home[node.target.id].add(path)
            if isinstance(node, ast.Attribute) and _private(node.attr):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if own and isinstance(node.ctx, ast.Store):
                    home[node.attr].add(path)
                elif not own:
                    used.append((node.attr, path, node.lineno))
    return [f"{path}:{line} {name}" for name, path, line in used if home[name] and path not in home[name]]


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported_by(path: str) -> set[str]:
    """Return the modules of ours that a file imports."""
    nodes = [node for node in ast.walk(trees()[path]) if isinstance(node, ast.ImportFrom)]
    return {str(node.module) for node in nodes if str(node.module).startswith("trueup.")}


def repeated_names() -> dict[str, list[str]]:
    """Return names of modules, and of public functions and classes, that stand in several places for several ideas."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        if (stem := Path(path).stem) not in ("__init__", "__main__"):
            places[f"module {stem}"].append(path)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return {name: where for name, where in places.items() if len(where) > 1 and name.split()[-1] not in ONE_IDEA}


def attributes_of_split_model() -> list[str]:
    """Return the attributes of a SplitModel beyond those of every module."""
    import torch

    from trueup import adapt

    net = adapt(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)), "tsd", example=torch.randn(2, 4)).net
    common = vars(torch.nn.Module())
    return sorted({*vars(net), *net._modules} - {*common})


def files_of_a_batch() -> list[str]:
    """Return the files of ours that one guarded TSD batch enters, once the adapter is built."""
    import torch

    import trueup
    from trueup.testing import convnet, images

    adapter = trueup.adapt(convnet(), "tsd", guard=True)
    for seed in range(3):
        adapter(images(16, seed=seed)[0])
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(str(SOURCE)):
            entered.add(str(Path(name).relative_to(SOURCE)))

    x = images(16, seed=9)[0]
    with torch.no_grad():
        sys.setprofile(note)
        try:
            adapter(x)
        finally:
            sys.setprofile(None)
    return sorted(entered)


def main() -> None:
    """Print all counts."""
    lines = sum(len(path.read_text().splitlines()) for path in FILES)
    print(f"lines of src: {lines} in {len(FILES)} files")
    for what, found in (
        ("private reach-ins between modules", reach_ins()),
        ("modules of ours imported by core/adapter.py", sorted(imported_by("core/adapter.py"))),
        ("attributes of SplitModel", attributes_of_split_model()),
        ("names that stand for several ideas", [f"{n}: {', '.join(w)}" for n, w in repeated_names().items()]),
        ("files entered by one guarded TSD batch", files_of_a_batch()),
    ):
        print(f"{what}: {len(found)}", *found, sep="\n  ")


if __name__ == "__main__":
    main()
