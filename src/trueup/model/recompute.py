"""Activations that are not kept for backward but worked out again there, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from trueup.model.caches import Caches

Forward = Callable[..., Any]


class UnfitError(Exception):
    """Blocks cannot be worked out again: their input or a buffer was changed in place, or they ran before."""

    def __init__(self, blocks: set[nn.Module]) -> None:
        super().__init__(f"{sorted({type(block).__name__ for block in blocks})} cannot be worked out again")
        self.blocks = blocks


def blocks_of(model: nn.Module, head: str | None) -> list[nn.Module]:
    """The parts of a model that follow one another and have several layers each, and chains of single layers.

    Not the part with the head, whose features are wanted.
    """
    layer = model.get_submodule(head) if head else None
    found: dict[nn.Module, None] = {}  # one that stands in several places is one

    def walk(module: nn.Module, inside: bool) -> None:
        if inside and not _chain(module) and _layers(module) > 1 and layer not in set(module.modules()):
            found[module] = None
            return
        before = len(found)
        for child in module.children():
            walk(child, _chain(module))
        if isinstance(module, nn.Sequential) and _chain(module) and len(found) == before and len(_cut(module)) > 1:
            found[module] = None

    walk(model, False)
    return list(found)


def _chain(module: nn.Module) -> bool:
    """Whether its children are called one after another; a Sequential with a forward of its own may do anything."""
    return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward


def _layers(module: nn.Module) -> int:
    return sum(any(True for _ in m.parameters(recurse=False)) for m in module.modules())


def _cut(chain: nn.Sequential) -> list[list[nn.Module]]:
    """A chain in about as many parts as each has layers; a part starts with a layer, which leaves its input alone."""
    children = list(chain)
    starts = [i for i, child in enumerate(children) if _layers(child)]
    each = max(2, isqrt(len(starts)))
    marks = [0, *starts[each::each], len(children)]
    return [children[a:b] for a, b in pairwise(marks)]


@dataclass
class Fitness:
    """What is known of the blocks of a model."""

    unfit: set[nn.Module] = field(default_factory=set)
    """Those that keep their activations."""
    ran: set[object] | None = None
    """Those that ran in this pass, where to run again is to run with other statistics."""
    given: list[tuple[nn.Module, Tensor, int]] | None = None
    """What went into the blocks in this pass, and how often each had been written to then."""

    def written(self) -> set[nn.Module]:
        """Blocks whose inputs were written to since, so that they cannot be worked out again from them."""
        return {block for block, t, version in self.given or () if t._version != version}


@contextmanager
def recomputing(model: nn.Module, head: str | None, fitness: Fitness, caches: Caches) -> Iterator[None]:
    """In here blocks keep only what goes into them; what lies between is worked out again in backward."""
    layer = model.get_submodule(head) if head is not None else None

    def forgetful(block: nn.Module, forward: Forward) -> Forward:
        return _forgetful(block, forward, fitness, model, caches)

    with ExitStack() as stack:
        for block in blocks_of(model, head):
            if isinstance(block, nn.Sequential) and _chain(block):
                forward = _in_parts(block, layer, forgetful)
            else:
                forward = forgetful(block, block.forward)
            stack.enter_context(replaced(block, forward))
        yield


def _in_parts(
    chain: nn.Sequential, head: nn.Module | None, forgetful: Callable[[nn.Module, Forward], Forward]
) -> Forward:
    parts = []
    for part in _cut(chain):
        through = _through(part)
        whole = any(head is m for child in part for m in child.modules())
        parts.append(through if whole else forgetful(chain, through))
    return _through(parts)


def _through(steps: Any) -> Forward:
    def run(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    return run


def _forgetful(block: nn.Module, forward: Forward, fitness: Fitness, model: nn.Module, caches: Caches) -> Forward:
    own = object()  # a chain has several parts

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or block in fitness.unfit:
            return forward(*args, **kwargs)
        if fitness.ran is not None:
            if own in fitness.ran:
                raise UnfitError({block})
            fitness.ran.add(own)
        given = tree_map(lambda leaf: leaf, (args, kwargs))  # lists of its own: a block may write to those it gets
        inputs = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
        kept, waiting = caches.held(model), [(args, kwargs)]

        def once_more(*_: Tensor) -> Any:
            if not waiting:
                caches.put(model, kept)
            their, named = waiting.pop() if waiting else tree_map(lambda leaf: leaf, given)
            return forward(*their, **named)

        held = [t for t in (*inputs, *block.buffers()) if not t.is_inference()]
        before = [t._version for t in held]
        out = checkpoint(once_more, *inputs, use_reentrant=False)
        if before != [t._version for t in held]:
            raise UnfitError({block})
        if fitness.given is not None:
            fitness.given += [(block, t, t._version) for t in inputs if not t.is_inference()]
        return out

    return run


@contextmanager
def replaced(module: nn.Module, forward: Forward) -> Iterator[None]:
    """A module with another forward, for a while."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
