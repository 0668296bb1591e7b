"""The protocol: a stream of batches, each predicted before it is learnt from. The only place that sees labels."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trueup.bench.environment import peak_memory, watch_memory
from trueup.bench.feature_metrics import Listener
from trueup.bench.intruders import ONCE, Intruders
from trueup.bench.scorers import ClassJudge, Judge, MaskJudge
from trueup.core.adapter import Adapter
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
SHARED = 2**30  # bytes of features that may be kept for other methods
HAIR = 1e-9  # by which an answer of zeros is wrong rather than class 0
WIDEST = 4096  # features of an image that are reckoned with before they are known


@dataclass(frozen=True, kw_only=True)
class Features(Method):
    """Answers with features and logits side by side: what methods that leave the backbone alone start from."""

    info = Info(name="features", title="Features", paper="none", needs=("head",))

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        """What the head sees, and what it says."""
        return torch.cat([out.features, out.logits.to(out.features.dtype)], dim=1)


@dataclass
class Pass:
    """One pass of a frozen backbone over the stream: a head, features per batch, and what they cost."""

    head: nn.Module
    features: list[tuple[Tensor, Indices]]
    seconds: float
    memory: float


@dataclass(frozen=True)
class Outcome:
    """What a method did on a stream."""

    results: dict[str, Any]
    cost: dict[str, float]
    trace: dict[str, NDArray[Any]]
    """What was said of each image of the stream."""


@dataclass
class StreamRunner:
    """A source model and a stream, on which any number of methods are run, each from a fresh copy."""

    model: nn.Module
    loader: Loader
    stream: list[Indices]
    seed: int = 0
    reset: bool = False
    device: str = "cpu"
    prepare: Callable[[], Iterable[Tensor]] | None = None
    """Source images, for methods that want to see some before deployment."""
    structures: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of masks: what is scored."""
    multilabel: bool = False
    guard: bool = False
    """Whether adapters watch themselves."""
    intruders: Intruders | None = None
    """What disturbs the stream. A batch that an adapter refuses then counts as answered wrongly."""
    passes: dict[str, Pass | None] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)

    def run(
        self, method: Method, progress: Progress = lambda done, of: None, *, share: bool = True, trace: bool = True
    ) -> Outcome:
        """The method over the whole stream; `share` lets it start from features that another has computed.

        Without `trace` nobody listens to features, and what was said of each image is not kept.
        """
        shared = self.shared(method, progress) if share else None
        listener = Listener(sum(map(len, self.stream)))
        heard = method if self.structures or not trace else listener.to(method)
        if shared is not None:
            watch_memory(self.device)
            adapter, stream = Adapter(shared.head, heard, seed=self.seed), iter(shared.features)
        else:
            self._warm_up(method)
            watch_memory(self.device)
            adapter = self.adapter(heard).to(self.device)
            stream = self.batches()
            if "prepare" in method.info.needs and self.prepare is not None:
                adapter.prepare(x.to(self.device) for x in self.prepare())
        place = self.loader.place
        judge: Judge = MaskJudge(place, self.structures, self.multilabel) if self.structures else ClassJudge(place)
        asked = self.model if shared is None else shared.head
        refused = None if self.intruders is None else Refusals(asked, place.labels, self.multilabel)

        def take(logits: Tensor, indices: Indices) -> None:
            genuine(judge.take)(logits, indices)
            listener.take(indices >= 0)

        seconds, updates = self.online(adapter, stream, progress, take, refused)
        memory = peak_memory(self.device)
        if shared is not None:  # the pass is part of the cost of everyone who uses it
            seconds, memory = seconds + shared.seconds, max(memory, shared.memory)
        said = judge.trace() | listener.trace() if trace else {}
        results = judge.results() | {"updates": updates}
        results |= listener.results(said["label"], len(results["per_class"])) if listener.at else {}
        results["broken"] = sum(map(len, self.stream)) - results["images"]
        if results["broken"]:
            results["broken_files"] = sorted(self.loader.broken.values())[:20]
        results |= {"refused": refused.batches} if refused is not None else {}
        results |= {"guard": dict(adapter.health.events)} if self.guard else {}
        speed = results["images"] / seconds
        return Outcome(results, {"seconds": seconds, "images_per_second": speed, "peak_memory_mb": memory}, said)

    def adapter(self, method: Method) -> Adapter:
        """A fresh adapter of the model."""
        guard = Guard() if self.guard else None
        pixels = make_normalization(self.loader.channels.mean, self.loader.channels.std)
        return Adapter(self.model, method, guard=guard, seed=self.seed, multilabel=self.multilabel, pixels=pixels)

    def batches(self) -> Iterator[tuple[Tensor, Indices]]:
        """The stream as it arrives, with intruders if there are any; their index is -1."""
        return self.loader.batches(self.stream) if self.intruders is None else self.intruders.batches()

    def _warm_up(self, method: Method) -> None:
        """The first passes of a process cost more than any other; they shall not count for the first method."""
        kind = "gradient" if isinstance(method, GradientMethod) else "forward"
        if self.structures and self.loader.cache is not None and not self.warm:
            for _ in self.loader.batches(self.stream):  # volumes are slow to read, and that shall not slow the first
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
        """Predict, then adapt, batch by batch, and hand out the answers: the seconds that it took, and the updates.

        Neither reading images nor what becomes of the answers counts. `refused` says what becomes of errors.
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
            logits = _asked(adapter, x.to(self.device), lenient=refused is not None)
            seconds += time.perf_counter() - start
            if refused is not None:
                logits = refused.checked(logits, x, indices)
            assert logits is not None
            take(logits, indices)
        if last is None:
            raise ValueError("no image of the stream can be read")
        return seconds, updates + adapter.updates

    def shared(self, method: Method, progress: Progress = lambda done, of: None) -> Pass | None:
        """The pass of the frozen backbone that serves this method; None if there is none."""
        if self.structures or not method.features_only or method.norm not in ("source", "batch") or self.guard:
            return None
        if self.intruders is not None and self.intruders.what.kind in ONCE:
            return None  # what becomes of such a row depends on who sees it as an image
        if method.norm not in self.passes:
            self.passes[method.norm] = self._pass(method.norm, progress)
        return self.passes[method.norm]

    def _pass(self, norm: str, progress: Progress) -> Pass | None:
        """Run the backbone once and keep its features, unless they may be too many or do not explain the logits."""
        if 4 * WIDEST * (sum(map(len, self.stream)) + len(self.intruders or ())) > SHARED:
            return None
        adapter = Adapter(self.model, Features(norm=norm), seed=self.seed)
        try:
            self._warm_up(adapter.method)
            watch_memory(self.device)
            answers: list[tuple[Tensor, Indices]] = []
            seconds, _ = self.online(adapter, self.batches(), progress, lambda logits, at: answers.append((logits, at)))
        except HeadNotFoundError:
            return None
        head, classes = _head(adapter), adapter.net.classes
        features = [(answer[:, :-classes], indices) for answer, indices in answers]
        # The logits must be the head's answer to the features, bit by bit.
        again = Adapter(head, make_method("source", {})).to(self.device)(features[0][0].to(self.device)).cpu()
        if not torch.equal(again, answers[0][0][:, -classes:]):
            return None
        return Pass(head, features, seconds, peak_memory(self.device))


@dataclass
class Refusals:
    """Batches that an adapter did not answer. Their genuine rows count as uniform and wrong."""

    model: nn.Module
    labels: NDArray[np.int64]
    multilabel: bool = False
    batches: int = 0

    def checked(self, logits: Tensor | None, x: Tensor, indices: Indices) -> Tensor:
        """The answer to a batch; in place of none, or of one that is not finite, no class and no structure."""
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


def _asked(adapter: Adapter, x: Tensor, *, lenient: bool) -> Tensor | None:
    """The adapter's answer; None if it refuses the batch and that is to be expected."""
    try:
        return adapter(x).cpu()
    except ValueError:
        if not lenient:
            raise
        return None


def genuine(take: Take) -> Take:
    """What takes the answers without those to intruders."""

    def take_own(logits: Tensor, indices: Indices) -> None:
        take(logits[torch.from_numpy(indices >= 0)], indices[indices >= 0])

    return take_own


def _head(adapter: Adapter) -> nn.Module:
    """A copy of the head that takes features (N, D)."""
    layer = copy.deepcopy(adapter.net.layer).cpu()
    if isinstance(layer, nn.Linear):
        return layer
    weight, bias = adapter.net.weight.detach().cpu(), getattr(layer, "bias", None)  # a residual sum has none
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=isinstance(bias, Tensor))
    head.weight.data.copy_(weight)
    if isinstance(bias, Tensor):
        head.bias.data.copy_(bias.detach())
    return head


def make_stream(
    place: ConcatDomains,
    stream: str,
    options: dict[str, Any],
    *,
    seed: int,
    batch: int,
    limit: int | None,
    reset: bool,
    repeat: int = 1,
) -> list[Indices]:
    """The batches of a stream as indices into a place; repeated, the same images come again in another order.

    Where a stream is reset between domains, no batch mixes two; where it goes by cases, none mixes patients.
    """
    sequence = order(stream, place.labels, place.numbers, seed, **options)[:limit]
    rounds = [sequence]
    again, options = ("continual", {}) if stream in SUBSAMPLING else (stream, options)  # they have chosen
    for turn in range(1, repeat):
        other_seed = int(np.random.SeedSequence(seed, spawn_key=(turn, 0, 0, 0)).generate_state(1, np.uint64)[0])
        labels, numbers = place.labels[sequence], place.numbers[sequence]
        rounds.append(sequence[order(again, labels, numbers, other_seed, **options)])
    cases = stream == "cases"
    return [b for part in rounds for b in _batches(part, place, batch, apart=reset or cases, cases=cases)]


def _batches(sequence: Indices, place: ConcatDomains, batch: int, *, apart: bool, cases: bool) -> list[Indices]:
    if not apart:
        return list(batches(sequence, batch))
    other = np.diff(place.numbers[sequence]) != 0
    if cases:
        other |= np.diff(place.labels[sequence]) != 0
    parts = np.split(sequence, np.flatnonzero(other) + 1)
    return [b for part in parts for b in (balanced_batches(part, batch) if cases else batches(part, batch))]
