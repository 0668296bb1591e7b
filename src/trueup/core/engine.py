"""How a model is run: in which precision and layout, compiled or not, and whether activations are kept for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 2.0**12  # of a loss in fp16, so that small gradients are not rounded to zero


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Settings of how a model is run; they change the time and the memory that it takes, and roundings."""

    precision: str = "float32"
    """"float32" (what the model has, and autocast as it is set outside), "bf16" or "fp16" (autocast), or "auto"."""
    channels_last: bool | str = False
    """Whether convolutions have their channels last in memory; "auto" measures."""
    compile: bool = False
    """Whether torch.compile makes a graph of the network."""
    memory: str = "usual"
    """"low": activations are worked out again in backward, block by block, and features are kept in half precision."""
    measured: bool = False
    """Whether what was open has been measured; a saved state then brings its own choice."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.precision not in (*PRECISIONS, "auto"):
            raise ValueError(f"precision={self.precision!r} must be 'float32', 'bf16', 'fp16' or 'auto'")
        if not isinstance(self.channels_last, bool) and self.channels_last != "auto":
            raise ValueError(f"channels_last={self.channels_last!r} must be True, False or 'auto'")
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile={self.compile!r} must be True or False")
        if self.memory not in ("usual", "low"):
            raise ValueError(f"memory={self.memory!r} must be 'usual' or 'low'")
        if self.compile and self.memory == "low":
            raise ValueError("compile=True and memory='low' do not go together: leave one out")

    @property
    def open(self) -> bool:
        """Whether something is still to be measured."""
        return "auto" in (self.precision, self.channels_last)

    @property
    def scale(self) -> float:
        """What a loss is multiplied with before its gradient is worked out."""
        return SCALE if self.precision == "fp16" else 1.0

    def suits(self, norm: str) -> None:
        """Refuse a policy of normalisation that cannot be run so."""
        if self.compile and norm not in ("source", "batch"):
            raise ValueError(f"compile=True goes with norm='source' or 'batch', not with norm={norm!r}: leave one out")
        if self.memory == "low" and norm.startswith("instance"):
            raise ValueError(f"memory='low' does not go with norm={norm!r}, whose statistics move with a forward")

    def lay_out(self, model: nn.Module) -> None:
        """Put the weights of convolutions in their place."""
        if self.channels_last is True:
            model.to(memory_format=torch.channels_last)

    def placed(self, x: Tensor) -> Tensor:
        """An input laid out like the weights."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last is True and x.ndim == 4 else x

    @contextmanager
    def running(self, blocks: list[nn.Module], device: str) -> Iterator[None]:
        """In here the model runs in this precision, and its blocks keep their inputs alone."""
        dtype = PRECISIONS.get(self.precision)
        with ExitStack() as stack:
            if dtype is not None:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            if self.memory == "low" and torch.is_grad_enabled():
                stack.enter_context(recomputing(blocks))
            yield


def blocks_of(model: nn.Module, head: str | None) -> list[nn.Module]:
    """The parts of a model that follow one another and have several layers each; not the one with the head."""
    layer = model.get_submodule(head) if head else None
    found: list[nn.Module] = []

    def walk(module: nn.Module, inside: bool) -> None:
        chain = isinstance(module, nn.Sequential | nn.ModuleList)
        if inside and not chain and _layers(module) > 1 and layer not in set(module.modules()):
            found.append(module)
            return
        for child in module.children():
            walk(child, chain)

    walk(model, False)
    return found


def _layers(module: nn.Module) -> int:
    return sum(any(True for _ in m.parameters(recurse=False)) for m in module.modules())


@contextmanager
def recomputing(blocks: list[nn.Module]) -> Iterator[None]:
    """In here blocks keep only what goes into them; what lies between is worked out again in backward."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(replaced(block, _forgetful(block.forward)))
        yield


def _forgetful(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
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
