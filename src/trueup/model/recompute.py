"""Recomputation of activations in backward, block by block, instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


class NotRecomputableError(Exception):
    """Blocks cannot be recomputed: their input or a buffer was changed in place, or they ran before."""

    def __init__(self, blocks: set[nn.Module]) -> None:
        super().__init__(f"{sorted({type(block).__name__ for block in blocks})} cannot be recomputed")
        self.blocks = blocks


def find_blocks(model: nn.Module, head: str | None) -> list[nn.Module]:
    """Return the modules to recompute: members of a chain that have several layers, and chains of single layers.

    The block with the head is left out, because its features are wanted.
    """
    layer = model.get_submodule(head) if head else None
    found: dict[nn.Module, None] = {}  # one that stands in several places counts once

    def walk(module: nn.Module, in_chain: bool) -> None:
        if in_chain and not _is_chain(module) and _count_layers(module) > 1 and layer not in set(module.modules()):
            found[module] = None
            return
        before = len(found)
        for child in module.children():
            walk(child, _is_chain(module))
        alone = len(found) == before
        if alone and isinstance(module, nn.Sequential) and _is_chain(module) and len(_segments(module)) > 1:
            found[module] = None

    walk(model, False)
    return list(found)


def _is_chain(module: nn.Module) -> bool:
    """Return whether children are called one after another; a Sequential with its own forward may do anything."""
    return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward


def _count_layers(module: nn.Module) -> int:
    return sum(any(True for _ in m.parameters(recurse=False)) for m in module.modules())


def _segments(chain: nn.Sequential) -> list[list[nn.Module]]:
    """Cut a chain of n layers into about sqrt(n) segments, before layers that leave their input as it is."""
    children = list(chain)
    starts = [i for i, child in enumerate(children) if _count_layers(child)]
    each = max(2, isqrt(len(starts)))
    marks = [0, *starts[each::each], len(children)]
    return [children[a:b] for a, b in pairwise(marks)]


@dataclass
class RecomputedBlocks:
    """The blocks of a model that cannot be recomputed, and bookkeeping of the current forward."""

    unfit: set[nn.Module] = field(default_factory=set)
    """Blocks that keep their activations."""
    ran: set[object] | None = None
    """Blocks that ran in this forward, where a second call would have other statistics."""
    inputs: list[tuple[nn.Module, Tensor, int]] | None = None
    """Inputs of blocks in this forward, with their versions at that time."""

    @contextmanager
    def watched(self, *, once: bool) -> Iterator[None]:
        """Raise NotRecomputableError for blocks whose inputs are changed in place before a forward ends.

        once: raise it also for blocks that run twice.
        """
        self.ran, self.inputs = set() if once else None, []
        try:
            yield
            if changed := {block for block, t, version in self.inputs or () if t._version != version}:
                raise NotRecomputableError(changed)
        finally:
            self.ran = self.inputs = None


@contextmanager
def recomputing(model: nn.Module, head: str | None, blocks: RecomputedBlocks, caches: Caches) -> Iterator[None]:
    """Let blocks keep only their inputs; backward recomputes the rest."""
    layer = model.get_submodule(head) if head is not None else None

    def wrap(block: nn.Module, forward: Forward) -> Forward:
        return _checkpointed(block, forward, blocks, model, caches)

    with ExitStack() as stack:
        for block in find_blocks(model, head):
            if isinstance(block, nn.Sequential) and _is_chain(block):
                forward = _segmented(block, layer, wrap)
            else:
                forward = wrap(block, block.forward)
            stack.enter_context(replaced_forward(block, forward))
        yield


def _segmented(chain: nn.Sequential, head: nn.Module | None, wrap: Callable[[nn.Module, Forward], Forward]) -> Forward:
    forwards = []
    for segment in _segments(chain):
        has_head = any(head is m for child in segment for m in child.modules())
        forwards.append(_compose(segment) if has_head else wrap(chain, _compose(segment)))
    return _compose(forwards)


def _compose(steps: Iterable[Forward]) -> Forward:
    def run(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    return run


def _checkpointed(
    block: nn.Module, forward: Forward, blocks: RecomputedBlocks, model: nn.Module, caches: Caches
) -> Forward:
    identity = object()  # one per segment of a chain

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or block in blocks.unfit:
            return forward(*args, **kwargs)
        if blocks.ran is not None:
            if identity in blocks.ran:
                raise NotRecomputableError({block})
            blocks.ran.add(identity)
        given = tree_map(lambda leaf: leaf, (args, kwargs))  # copied containers: a block may write to those it gets
        inputs = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
        cached, first_call = caches.values(model), [(args, kwargs)]

        def compute(*_: Tensor) -> Any:
            if not first_call:
                caches.assign(model, cached)
            positional, named = first_call.pop() if first_call else tree_map(lambda leaf: leaf, given)
            return forward(*positional, **named)

        watched = [t for t in (*inputs, *block.buffers()) if not t.is_inference()]
        before = [t._version for t in watched]
        out = checkpoint(compute, *inputs, use_reentrant=False)
        if before != [t._version for t in watched]:
            raise NotRecomputableError({block})
        if blocks.inputs is not None:
            blocks.inputs += [(block, t, t._version) for t in inputs if not t.is_inference()]
        return out

    return run


@contextmanager
def replaced_forward(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Give a module another forward for a while."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
