"""How a model is run: in which precision and layout, compiled or not, and whether activations are kept for backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 2.0**12  # of a loss in fp16, so that small gradients are not rounded to zero


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Settings of how a model is run; they change the time and the memory that it takes, and roundings."""

    precision: str = "float32"
    """"float32" (what the model has, and autocast as it is set outside), "bf16" or "fp16" (autocast), or "auto"."""
    channels_last: bool | str | None = None
    """Whether convolutions have their channels last in memory; "auto" measures. None: as the model has it, and with
    memory="low" last, if the model can be run so: convolutions then make no copies in a layout of their own."""
    compile: bool = False
    """Whether torch.compile makes a graph of the network."""
    memory: str = "usual"
    """"low": activations are worked out again in backward, block by block, and features are kept in half precision."""
    measured: tuple[str, ...] = ()
    """Which of these were left open and have been found out; of them a saved state brings its own choice."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.precision not in (*PRECISIONS, "auto"):
            raise ValueError(f"precision={self.precision!r} must be 'float32', 'bf16', 'fp16' or 'auto'")
        if not isinstance(self.channels_last, bool | None) and self.channels_last != "auto":
            raise ValueError(f"channels_last={self.channels_last!r} must be True, False or 'auto'")
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile={self.compile!r} must be True or False")
        if self.memory not in ("usual", "low"):
            raise ValueError(f"memory={self.memory!r} must be 'usual' or 'low'")
        if self.compile and self.memory == "low":
            raise ValueError("compile=True and memory='low' do not go together: leave one out")
        if self.channels_last is None and self.memory == "usual":
            object.__setattr__(self, "channels_last", False)

    @property
    def open(self) -> tuple[str, ...]:
        """What is still to be found out with a batch."""
        names = ("precision", "channels_last")
        return tuple(name for name in names if getattr(self, name) in ("auto", None))

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

    def lay_out(self, model: nn.Module, moved: set[str]) -> None:
        """Put the weights of convolutions in their place; `moved` are the names of those that were elsewhere."""
        last, usual = torch.channels_last, torch.contiguous_format
        for name, p in model.named_parameters() if self.channels_last is True else ():
            if p.ndim == 4 and not p.is_contiguous(memory_format=last):
                p.data = p.data.contiguous(memory_format=last)
                moved.add(name)
        while moved and self.channels_last is not True:
            p = model.get_parameter(moved.pop())
            p.data = p.data.contiguous(memory_format=usual)

    def placed(self, x: Tensor) -> Tensor:
        """An input laid out like the weights."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last is True and x.ndim == 4 else x

    def running(self, device: str) -> AbstractContextManager[object]:
        """In here the model runs in this precision."""
        dtype = PRECISIONS.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)
