"""The identity of an adapter: plain data in its state files, compared when one is loaded."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.core.registry import for_task

if TYPE_CHECKING:
    from trueup.core.lifecycle import AdapterBase
    from trueup.core.method import Method

REASONS = {
    "method": "another method",
    "multilabel": "a model whose outputs are read otherwise (multilabel)",
    "hyperparameters": "other hyper-parameters",
    "seed": "another seed",
    "parameters": "other parameters to update",
    "source": "another source model",
    "guard": "another guard, or none",
    "pixels": "images that were normalised otherwise (mean, std)",
}
"""The parts of an identity, and how a mismatch is described."""


def identity(adapter: AdapterBase, method: Method) -> dict[str, Any]:
    """Return the identity of an adapter; a hyper-parameter that is a function counts by what it selects."""
    hyper = {k: "a function" if callable(v) else v for k, v in method.hyperparameters().items()}
    return {
        "method": method.info.name,
        "multilabel": adapter.multilabel,
        "hyperparameters": json.loads(json.dumps(hyper)),
        "seed": adapter.random.seed,
        "parameters": list(adapter.net.selected),
        "source": adapter.source_digest()[:16],
        "guard": None if adapter.monitor is None else _plain(adapter.monitor.guard),
        "pixels": None if adapter.net.normalization is None else _plain(adapter.net.normalization),
    }


def refuse_foreign(adapter: AdapterBase, header: dict[str, Any], path: str | Path) -> None:
    """Refuse a state that belongs to another adapter."""
    method = adapter.method if adapter.built else for_task(adapter.method, adapter.hyper, header["task"])
    ours = identity(adapter, method)
    theirs = {**header, "hyperparameters": {**_later_defaults(method), **header["hyperparameters"]}}
    guard = None if adapter.monitor is None else adapter.monitor.guard
    theirs |= {"guard": _read(header["guard"], guard), "pixels": _read(header["pixels"], adapter.net.normalization)}
    for key, reason in REASONS.items():
        same = ours[key] == theirs[key] or json.dumps(ours[key]) == json.dumps(theirs[key])  # NaN equals NaN in JSON
        if not same and (key != "parameters" or adapter.built):
            there, here = _apart(theirs[key], ours[key])
            raise ValueError(f"{path} belongs to {reason}: {brief(there)}, here {brief(here)}")
    head = adapter.net.head if adapter.built else adapter.head_name
    if head != header["head"] and (adapter.built or head is not None):
        raise ValueError(f"{path} has the head {header['head']!r}, this adapter {head!r}")


def brief(value: Any) -> str:
    """Return a value as text of at most 120 characters."""
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _plain(value: Any, *, rule: bool = False) -> Any:
    """Return settings as JSON gives them back: a rule of a guard with its name, or by its own text if it has one."""
    # A __repr__ made by @dataclass has __wrapped__; one written by hand has not, and says what the value is.
    if dataclasses.is_dataclass(value) and hasattr(vars(type(value)).get("__repr__"), "__wrapped__"):
        shown = {f.name: _plain(getattr(value, f.name), rule=True) for f in dataclasses.fields(value) if f.repr}
        return {"rule": type(value).__name__, **shown} if rule else shown
    if isinstance(value, tuple | list):
        return [_plain(item, rule=rule) for item in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def _read(value: Any, ours: Any) -> Any:
    """Return settings as plain data; older files hold them as the text of a constructor call."""
    if not isinstance(value, str):
        return value
    if value in (repr(ours), repr(ours).replace("Normalization", "Pixels", 1)):
        return _plain(ours)
    try:
        return _from_call(ast.parse(value, mode="eval").body, rule=False) if value else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return value


def _from_call(node: ast.expr, *, rule: bool) -> Any:
    if isinstance(node, ast.Call):
        shown = {str(keyword.arg): _from_call(keyword.value, rule=True) for keyword in node.keywords}
        return {"rule": ast.unparse(node.func).rpartition(".")[2], **shown} if rule else shown
    if isinstance(node, ast.Tuple | ast.List):
        return [_from_call(item, rule=rule) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return float(ast.unparse(node)) if ast.unparse(node) in ("inf", "-inf") else ast.unparse(node)


def _later_defaults(method: Method) -> dict[str, Any]:
    """Return values of hyper-parameters that older files do not have."""
    return {"search": "exact"} if "search" in method.hyperparameters() else {}


def _apart(there: Any, here: Any) -> tuple[Any, Any]:
    """Return the entries of two dicts or lists, or of what is in them, that differ."""
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        there, here = dict(enumerate(there)), dict(enumerate(here))
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return there, here
    different = [k for k in {**there, **here} if k not in there or k not in here or there[k] != here[k]]
    both = {k: _apart(there[k], here[k]) for k in different if k in there and k in here}
    theirs = {k: both[k][0] if k in both else there[k] for k in different if k in there}
    return theirs, {k: both[k][1] if k in both else here[k] for k in different if k in here}
