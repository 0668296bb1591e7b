"""Forward hooks that are removed again, also after an exception."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def hooked(
    modules: Iterable[nn.Module],
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    **options: bool,
) -> Iterator[None]:
    """Call `before(module, args)` and `after(module, args, out)` around each call of the modules.

    options: of `register_forward_hook`.
    """
    modules = list(modules)
    handles = [m.register_forward_pre_hook(before) for m in modules] if before is not None else []
    handles += [m.register_forward_hook(after, **options) for m in modules] if after is not None else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
