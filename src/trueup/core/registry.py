"""Methods by name."""

import dataclasses
import difflib
from typing import Any, TypeVar

from trueup.core.method import Info, Method

_METHODS: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(cls: M) -> M:
    """Make a method available under `cls.info.name`; works as a decorator."""
    if not isinstance(getattr(cls, "info", None), Info):
        raise TypeError(f"{cls.__name__} must say what it is: info = Info(name=..., title=..., paper=...)")
    name = cls.info.name
    if not dataclasses.is_dataclass(cls) or "__dataclass_fields__" not in cls.__dict__:
        raise TypeError(f"{cls.__name__} must be decorated with @dataclass(frozen=True, kw_only=True) below @register")
    known = _METHODS.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"a method called {name!r} is registered already: {known.__module__}.{known.__qualname__}")
    _METHODS[name] = cls
    return cls


def list_methods() -> list[str]:
    """The names of all registered methods, in the order of registration."""
    return list(_METHODS)


def get_method(name: str) -> type[Method]:
    """The class of a registered method."""
    if name not in _METHODS:
        near = difflib.get_close_matches(name, _METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no method is called {name!r}{hint} There are: {', '.join(_METHODS)}")
    return _METHODS[name]


def make_method(name: str, hyper: dict[str, Any]) -> Method:
    """A method with these hyper-parameters."""
    cls = get_method(name)
    allowed = [f.name for f in dataclasses.fields(cls)]
    for key in hyper:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise TypeError(f"{name} has no hyper-parameter {key!r}{hint} It has: {', '.join(allowed)}")
    return cls(**hyper)
