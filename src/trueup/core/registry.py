"""The registry of methods by name. A name may have one class for images and another for pixels."""

import dataclasses
import difflib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from trueup.core.method import Info, Method

_METHODS: dict[str, list[type[Method]]] = {}
M = TypeVar("M", bound=type[Method])


def register(cls: M) -> M:
    """Make a method available under `cls.info.name`; works as a decorator."""
    if not isinstance(getattr(cls, "info", None), Info):
        raise TypeError(f"{cls.__name__} must have a description: info = Info(name=..., title=..., paper=...)")
    name = cls.info.name
    if not dataclasses.is_dataclass(cls) or "__dataclass_fields__" not in cls.__dict__:
        raise TypeError(f"{cls.__name__} must be decorated with @dataclass(frozen=True, kw_only=True) below @register")
    family = _METHODS.setdefault(name, [])
    for i, known in enumerate(family):
        if (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__):
            family[i] = cls
            return cls
        if set(known.info.tasks) & set(cls.info.tasks):
            raise ValueError(f"a method called {name!r} is registered already: {known.__module__}.{known.__qualname__}")
    family.append(cls)
    return cls


def list_methods(task: str | None = None) -> list[str]:
    """Return the names of all registered methods, or of those for a task, in the order of registration."""
    return [name for name, family in _METHODS.items() if task is None or any(task in c.info.tasks for c in family)]


def get_method(name: str, task: str | None = None) -> type[Method]:
    """Return the class of a registered method: the one for a task, else the first."""
    if name not in _METHODS:
        near = difflib.get_close_matches(name, _METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"no method is called {name!r}{hint} There are: {', '.join(_METHODS)}")
    family = _METHODS[name]
    found = next((cls for cls in family if task is None or task in cls.info.tasks), None)
    if found is None:
        reason = f": {family[0].info.unfit}" if family[0].info.unfit else ""
        others = ", ".join(list_methods(task))
        raise ValueError(f"{name} is not for {task}{reason}. Methods for {task}: {others}")
    return found


def make_method(name: str, hyper: Mapping[str, Any], task: str | None = None) -> Method:
    """Build a method with these hyper-parameters: for a task, else the first class of this name that accepts them."""
    cls = get_method(name, task)
    if task is None and (family := [c for c in _METHODS[name] if set(hyper) <= _fields(c)]):
        for cls in family[:-1]:  # a value may be valid for one class only
            with suppress(ValueError):
                return cls(**hyper)
        cls = family[-1]
    allowed = [f.name for f in dataclasses.fields(cls)]
    for key in hyper:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            which = f"{name} for {task}" if task is not None and len(_METHODS[name]) > 1 else name
            raise TypeError(f"{which} has no hyper-parameter {key!r}{hint} It has: {', '.join(allowed)}")
    return cls(**hyper)


def for_task(method: Method, given: Mapping[str, Any] | None, task: str) -> Method:
    """Return a method that supports the task: itself, or its sibling if it was built by name with `given`."""
    name = method.info.name
    if task in method.info.tasks:
        return method
    cls = get_method(name, task)
    if given is None:
        raise ValueError(f"{type(method).__name__} is not for {task}: pass {cls.__name__}(...) or {name!r}")
    try:
        return make_method(name, given, task)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _fields(cls: type[Method]) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}
