"""A method under test, the list of checks, and how they make adapters, streams and comparisons."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trueup.core.adapt import adapt
from trueup.core.adapter import Adapter
from trueup.core.method import GradientMethod, Method
from trueup.core.saving import to_file
from trueup.core.state import named_tensors
from trueup.testing import toys


class SkipCheck(Exception):  # noqa: N818  (it is no error)
    """A check that has nothing to check in this method; says why."""


def kinds(method: type[Method]) -> list[str]:
    """Return the kinds of data to test a method with: images, pixels of one class each, pixels of several labels."""
    names = {"classification": ["classification"], "segmentation": ["segmentation", "multilabel"]}
    return [kind for task in method.info.tasks for kind in names[task]]


@dataclass(frozen=True)
class Case:
    """A method's class and what it is tested with."""

    method: type[Method]
    hyper: dict[str, Any] = field(default_factory=dict)
    """Hyper-parameters other than the defaults. A stream is 70 to 350 images: choose a capacity, a warm-up or an
    interval small enough that the memory fills, the warm-up ends and updates come within it."""
    kind: str = "classification"
    """One of `kinds(method)`."""
    batch: int = 24
    """Images in a batch of a stream, at least 8; fewer for a method that takes long over each image."""

    @property
    def task(self) -> str:
        """The task of the adapter."""
        return "classification" if self.kind == "classification" else "segmentation"

    @property
    def multilabel(self) -> bool:
        """True if each output is a label of its own."""
        return self.kind == "multilabel"

    def bare(self) -> Adapter:
        """Return a new adapter of a tiny trained model, not prepared."""
        return adapt(self.model(), self.method(**self.hyper), multilabel=self.multilabel)

    def adapter(
        self, model: nn.Module | None = None, *, example: Tensor | None = None, guard: bool = False, **hyper: Any
    ) -> Adapter:
        """Return a new adapter of a tiny trained model; prepared, if the method asks for it."""
        method = self.method(**{**self.hyper, **hyper})
        adapter = adapt(model or self.model(), method, example=example, multilabel=self.multilabel, guard=guard)
        if "prepare" in self.method.info.needs:
            dtype = next(adapter.net.model.parameters()).dtype
            adapter.prepare([self.images(32, seed=s)[0].to(dtype) for s in (1, 2)])
        return adapter

    def model(self, norm: str = "batch", seed: int = 0) -> nn.Sequential:
        """Return a tiny trained model, with BatchNorm or ("groups") with other normalisation and dropout."""
        if self.task == "classification":
            return toys.convnet(seed) if norm == "batch" else toys.patchnet(seed)
        return toys.segnet(seed, norm=norm, multilabel=self.multilabel)

    def images(self, n: int, *, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
        """Images and what they show."""
        if self.task == "classification":
            return toys.images(n, seed=seed, shift=shift)
        x, y = toys.scenes(n, seed=seed, shift=shift)
        return x, toys.as_labels(y) if self.multilabel else y

    def stream(self, batches: int, size: int | None = None, *, seed: int = 0, shift: float = 1.0) -> list[Tensor]:
        """Shifted batches without labels."""
        seeds = range(50_000 + 1000 * seed, 50_000 + 1000 * seed + batches)
        return [self.images(size or self.batch, seed=s, shift=shift)[0] for s in seeds]

    def shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the answer to n images."""
        if self.task == "classification":
            return n, toys.CLASSES
        return n, 2 if self.multilabel else 3, toys.SCENE, toys.SCENE

    def right(self, answer: Tensor, y: Tensor) -> Tensor:
        """Return the fraction of an answer that is right."""
        found = answer > 0 if self.multilabel else answer.argmax(dim=1)
        return (found == y).float().mean()

    def has(self, name: str) -> bool:
        """Return True if the method has this hyper-parameter."""
        return name in self.method.__dataclass_fields__

    @property
    def learns(self) -> bool:
        """True if the method takes gradient steps."""
        return issubclass(self.method, GradientMethod)


Check = Callable[[Case], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Add a function to the contract under its own name."""
    CHECKS[function.__name__] = function
    return function


def check_method(method: type[Method], **hyper: Any) -> None:
    """Run every check on a method, for each of its tasks; an AssertionError names those that fail."""
    failures = []
    for kind in kinds(method):
        for name, check in CHECKS.items():
            try:
                check(Case(method, hyper, kind))
            except SkipCheck:
                continue
            except Exception as error:
                failures.append(f"{name} ({kind}): {type(error).__name__}: {error}")
    assert not failures, f"{method.__name__} breaks the contract:\n" + "\n".join(failures)


def play(adapter: Adapter, xs: list[Tensor]) -> list[Tensor]:
    """Return the adapter's answers to a stream."""
    return [adapter(x) for x in xs]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Equal to the bit."""
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def difference(a: Adapter, b: Adapter) -> list[str]:
    """In what two adapters differ, down to the bit: weights, statistics, memory, optimiser, random stream, counters."""
    (left, here), (right, there) = (_whole(x) for x in (a, b))
    names = left.keys() ^ right.keys()
    names |= {n for n in left.keys() & right.keys() if not torch.equal(left[n], right[n])}
    names |= {key for key in here if here[key] != there[key]}
    return sorted(names)


def _whole(adapter: Adapter) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not adapter.built:
        return dict(adapter.state_dict()), {"batches": adapter.batches}
    tensors, header = to_file(adapter)
    return tensors | {f"model/{n}": t.detach() for n, t in named_tensors(adapter.net.model).items()}, header


@contextmanager
def raises(error: type[Exception], otherwise: str) -> Iterator[None]:
    """Fail with the message `otherwise` unless the block raises this error."""
    try:
        yield
    except error:
        return
    raise AssertionError(otherwise)


def reload(adapter: Adapter, other: Adapter) -> Adapter:
    """Save the state of an adapter, load it into another and return that one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        adapter.save(path)
        assert [p.name for p in Path(folder).iterdir()] == ["state.safetensors"]
        other.load(path)
    return other


def frozen_tensors(adapter: Adapter) -> list[Tensor]:
    """Copy all tensors of model and state."""
    return [t.detach().clone() for part in (adapter.net, adapter.state) for t in (*part.parameters(), *part.buffers())]
