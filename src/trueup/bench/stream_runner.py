"""The online protocol: each batch of a stream is predicted before it is learnt from. Labels stop here."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trueup.bench.environment import peak_memory, reset_peak_memory
from trueup.bench.feature_metrics import FeatureRecorder
from trueup.bench.intruders import ONCE, Intruders
from trueup.bench.scorers import ClassScorer, MaskScorer, Scorer
from trueup.core.adapter import Adapter
from trueup.core.effects import check_effect
from trueup.core.method import GradientMethod, Info, Method
from trueup.core.registry import make_method
from trueup.data.loading import ConcatDomains, Loader
from trueup.data.streams import SUBSAMPLING, balanced_batches, batches, order
from trueup.guard.config import Guard
from trueup.model.heads import HeadNotFoundError
from trueup.model.split_model import Output, SplitModel
from trueup.views import make_normalization

Indices = NDArray[np.int64]
Take = Callable[[Tensor, Indices], None]
Progress = Callable[[int, int], None]
SHARED = 2**30  # bytes of features that are kept for other methods at most
HAIR = 1e-9  # lowers the true class of a refused row, so that it counts as wrong
WIDEST = 4096  # assumed features per image, before the number is known


@dataclass(frozen=True, kw_only=True)
class Features(Method):
    """A method that answers with features and logits, for methods that share a backbone pass."""

    info = Info(name="features", title="Features", paper="none", needs=("head",))

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """Return features and logits side by side."""
        return torch.cat([out.features, out.logits.to(out.features.dtype)], dim=1)


@dataclass
class BackbonePass:
    """One pass of a frozen backbone over the stream: the head, the features of each batch, and their cost."""

    head: nn.Module
    features: list[tuple[Tensor, Indices]]
    seconds: float
    memory: float


@dataclass(frozen=True)
class StreamResult:
    """Results, cost and trace of a method on a stream."""

    results: dict[str, Any]
    cost: dict[str, float]
    trace: dict[str, NDArray[Any]]  # the answers to each image of the stream


@dataclass
class StreamRunner:
    """A source model and a stream; each method runs on a fresh copy of the model."""

    model: nn.Module
    loader: Loader
    stream: list[Indices]
    seed: int = 0
    reset: bool = False
    device: str = "cpu"
    prepare: Callable[[], Iterable[Tensor]] | None = None
    """Returns batches of source images, for methods that need some before deployment."""
    structures: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Structures of masks to score; empty for classification."""
    multilabel: bool = False
    guard: bool = False
    """If adapters have a guard."""
    intruders: Intruders | None = None
    """Disturbances of the stream; with them, a batch that an adapter refuses counts as wrong."""
    passes: dict[str, BackbonePass | None] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)

    def run(
        self, method: Method, progress: Progress = lambda done, of: None, *, share: bool = True, trace: bool = True
    ) -> StreamResult:
        """Run a method over the whole stream.

        share: reuse the features of a backbone pass. trace: record features and the answers to each image.
        """
        shared = self.shared(method, progress) if share else None
        adapter, stream = self._start(method, shared)
        data = self.loader.place
        scorer: Scorer = MaskScorer(data, self.structures, self.multilabel) if self.structures else ClassScorer(data)
        recorder = FeatureRecorder(sum(map(len, self.stream)))
        if trace and not self.structures:
            adapter.answer_observers.append(recorder.observe)
        model = self.model if shared is None else shared.head
        refused = None if self.intruders is None else Refusals(model, data.labels, self.multilabel)

        def take(logits: Tensor, indices: Indices) -> None:
            own = indices >= 0  # not those of intruders
            scorer.take(logits[torch.from_numpy(own)], indices[own])
            recorder.keep(own)

        seconds, updates = self.online(adapter, stream, progress, take, refused)
        memory = peak_memory(self.device)
        if shared is not None:  # the pass is part of the cost of every method that uses it
            seconds, memory = seconds + shared.seconds, max(memory, shared.memory)
        traced = scorer.trace() | recorder.trace() if trace else {}
        results = scorer.results() | {"updates": updates}
        results |= recorder.results(traced["label"], len(results["per_class"])) if recorder.at else {}
        results["broken"] = sum(map(len, self.stream)) - results["images"]
        if results["broken"]:
            results["broken_files"] = sorted(self.loader.broken.values())[:20]
        results |= {"refused": refused.batches} if refused is not None else {}
        results |= {"guard": dict(adapter.health.events)} if self.guard else {}
        speed = results["images"] / seconds
        return StreamResult(results, {"seconds": seconds, "images_per_second": speed, "peak_memory_mb": memory}, traced)

    def _start(self, method: Method, shared: BackbonePass | None) -> tuple[Adapter, Iterator[tuple[Tensor, Indices]]]:
        """Return a fresh adapter, and its batches: images, or the features of a backbone pass."""
        if shared is None:
            self._warm_up(method)
        reset_peak_memory(self.device)
        if shared is not None:
            check_effect(self.model, method)
            # The head alone has no statistics to set: the backbone pass has set them.
            return Adapter(shared.head, replace(method, norm="source"), seed=self.seed), iter(shared.features)
        adapter, stream = self.adapter(method).to(self.device), self.batches()
        if "prepare" in method.info.needs and self.prepare is not None:
            adapter.prepare(x.to(self.device) for x in self.prepare())
        return adapter, stream

    def adapter(self, method: Method) -> Adapter:
        """Make a fresh adapter of the model."""
        guard = Guard() if self.guard else None
        pixels = make_normalization(self.loader.channels.mean, self.loader.channels.std)
        return Adapter(
            self.model, method, guard=guard, seed=self.seed, multilabel=self.multilabel, normalization=pixels
        )

    def batches(self) -> Iterator[tuple[Tensor, Indices]]:
        """Yield the batches of the stream with their indices; intruders have index -1."""
        return self.loader.batches(self.stream) if self.intruders is None else self.intruders.batches()

    def _warm_up(self, method: Method) -> None:
        """Run a batch untimed: the first passes of a process are slower than the others."""
        kind = "gradient" if isinstance(method, GradientMethod) else "forward"
        if self.structures and self.loader.cache is not None and not self.warm:
            for _ in self.loader.batches(self.stream):  # fill the cache: volumes are slow to read
                pass
        if kind not in self.warm and "prepare" not in method.info.needs:
            for x, _ in self.loader.batches(self.stream[:1]):
                self.adapter(method).to(self.device)(x.to(self.device))
            self.warm.add(kind)

    def online(
        self,
        adapter: Adapter,
        stream: Iterator[tuple[Tensor, Indices]],
        progress: Progress,
        take: Take,
        refused: Refusals | None = None,
    ) -> tuple[float, int]:
        """Predict and adapt batch by batch, pass on the answers, and return the adapter's seconds and updates.

        Reading images and scoring are not timed. `refused` replaces the answers that are missing or not finite.
        """
        adapter = adapter.to(self.device)
        domains = self.loader.place.numbers
        seconds, updates, last = 0.0, 0, None
        for done, (x, indices) in enumerate(stream):
            progress(done, len(self.stream))
            own = indices[indices >= 0]
            here = domains[own[0]]
            if self.reset and last is not None and here != last:
                updates += adapter.updates
                adapter.reset()
            last = domains[own[-1]]
            start = time.perf_counter()
            answer: Tensor | None = None
            try:
                answer = adapter(x.to(self.device)).cpu()
            except ValueError:
                if refused is None:
                    raise
            seconds += time.perf_counter() - start
            if refused is not None:
                answer = refused.checked(answer, x, indices)
            assert answer is not None
            take(answer, indices)
        if last is None:
            raise ValueError("no image of the stream can be read")
        return seconds, updates + adapter.updates

    def shared(self, method: Method, progress: Progress = lambda done, of: None) -> BackbonePass | None:
        """Return the backbone pass that serves this method; None if it needs its own."""
        if self.structures or not method.features_only or method.norm not in ("source", "batch") or self.guard:
            return None
        if self.intruders is not None and self.intruders.disturbance.kind in ONCE:
            return None  # methods treat such images differently
        if method.norm not in self.passes:
            self.passes[method.norm] = self._pass(method.norm, progress)
        return self.passes[method.norm]

    def _pass(self, norm: str, progress: Progress) -> BackbonePass | None:
        """Run the backbone once and keep its features; None if they may be too many or do not give the logits."""
        if 4 * WIDEST * (sum(map(len, self.stream)) + len(self.intruders or ())) > SHARED:
            return None
        adapter = Adapter(self.model, Features(norm=norm), seed=self.seed)
        try:
            self._warm_up(adapter.method)
            reset_peak_memory(self.device)
            answers: list[tuple[Tensor, Indices]] = []
            seconds, _ = self.online(adapter, self.batches(), progress, lambda logits, at: answers.append((logits, at)))
        except HeadNotFoundError:
            return None
        head, classes = _head(adapter), adapter.net.classes
        features = [(answer[:, :-classes], indices) for answer, indices in answers]
        # The head must give the logits from the features bit by bit.
        again = Adapter(head, make_method("source", {})).to(self.device)(features[0][0].to(self.device)).cpu()
        if not torch.equal(again, answers[0][0][:, -classes:]):
            return None
        return BackbonePass(head, features, seconds, peak_memory(self.device))


@dataclass
class Refusals:
    """Batches that an adapter refused. Their genuine rows count as uniform and wrong."""

    model: nn.Module
    labels: NDArray[np.int64]
    multilabel: bool = False
    batches: int = 0

    def checked(self, logits: Tensor | None, x: Tensor, indices: Indices) -> Tensor:
        """Return the answer to a batch; if it is missing or not finite, one that is wrong for every genuine row."""
        own = np.flatnonzero(indices >= 0)
        if logits is not None and bool(logits[own].isfinite().all()):
            return logits
        self.batches += 1
        shape = Adapter(self.model, make_method("source", {}), multilabel=self.multilabel)(x[own]).shape
        logits = torch.zeros(len(x), *shape[1:])
        if logits.ndim == 2:
            logits[own, self.labels[indices[own]]] = -HAIR
        elif self.multilabel:
            logits -= 1
        else:
            logits[:, 0] = 1  # the background
        return logits


def _head(adapter: Adapter) -> nn.Module:
    """Return a copy of the head that takes features (N, D)."""
    layer = copy.deepcopy(adapter.net.layer).cpu()
    if isinstance(layer, nn.Linear):
        return layer
    weight, bias = adapter.net.weight.detach().cpu(), getattr(layer, "bias", None)  # a residual sum has no bias
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=isinstance(bias, Tensor))
    head.weight.data.copy_(weight)
    if isinstance(bias, Tensor):
        head.bias.data.copy_(bias.detach())
    return head


def make_stream(
    data: ConcatDomains,
    stream: str,
    options: dict[str, Any],
    *,
    seed: int,
    batch: int,
    limit: int | None,
    reset: bool,
    repeat: int = 1,
) -> list[Indices]:
    """Return the batches of a stream as indices into the data; each repetition has a new order.

    With a reset between domains no batch mixes two domains; in the stream "cases" none mixes two patients.
    """
    sequence = order(stream, data.labels, data.numbers, seed, **options)[:limit]
    rounds = [sequence]
    again, options = ("continual", {}) if stream in SUBSAMPLING else (stream, options)  # its images are chosen
    for turn in range(1, repeat):
        other_seed = int(np.random.SeedSequence(seed, spawn_key=(turn, 0, 0, 0)).generate_state(1, np.uint64)[0])
        labels, numbers = data.labels[sequence], data.numbers[sequence]
        rounds.append(sequence[order(again, labels, numbers, other_seed, **options)])
    cases = stream == "cases"
    return [b for part in rounds for b in _batches(part, data, batch, apart=reset or cases, cases=cases)]


def _batches(sequence: Indices, data: ConcatDomains, batch: int, *, apart: bool, cases: bool) -> list[Indices]:
    if not apart:
        return list(batches(sequence, batch))
    other = np.diff(data.numbers[sequence]) != 0
    if cases:
        other |= np.diff(data.labels[sequence]) != 0
    parts = np.split(sequence, np.flatnonzero(other) + 1)
    return [b for part in parts for b in (balanced_batches(part, batch) if cases else batches(part, batch))]
