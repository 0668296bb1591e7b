"""A model split at its head: features before the last linear layer, scores after it, logits as the model gives them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trueup import devices
from trueup.finite import NotFiniteError, check_values, usable
from trueup.model.caches import Caches
from trueup.model.calls import Batch, Signature, as_called
from trueup.model.graph import Calls, Graph, recording_calls
from trueup.model.heads import HeadNotFoundError, as_logits, call_model, output_function, rows_of
from trueup.model.readout import classify, seen_at, weight_of
from trueup.model.recompute import Fitness, UnfitError, recomputing
from trueup.model.runner import Engine
from trueup.model.steps import Steps
from trueup.norm.policy import applying_policy, batch_statistics, policy_of
from trueup.norm.robust import Robust, Rows, inlier_rows, recording_rows
from trueup.norm.used_statistics import UsedStatistics
from trueup.views import Normalization

log = logging.getLogger("trueup")

# A segmenter's layer that sees fewer values per channel than this keeps the source's statistics: DeepLab pools a whole
# image into one value, and the deviation of a batch of few such values is noise.
FEWEST = 16


@dataclass(frozen=True)
class Output:
    """One forward pass: `features` (N, D) and `scores` (N, C) at the head, `logits` as the model returns them.

    A segmenter has maps of them, (N, D, H, W), at the resolution of its head; its logits may be larger. All are at
    least float32, so that losses are. Where the model has no head, features and scores are the logits. `memo` is
    scratch space of this call.
    """

    x: Tensor
    features: Tensor
    scores: Tensor
    logits: Tensor
    memo: dict[str, Any] = field(default_factory=dict)

    def flat(self) -> tuple[Tensor, Tensor]:
        """Features and scores with one row per image, or per pixel: image after image, pixels in their order."""
        rows = (t.movedim(1, -1).reshape(-1, t.shape[1]) for t in (self.features, self.scores))
        return next(rows), next(rows)

    def of_label(self, label: int) -> Output:
        """What one label of a multi-label model says: two classes with the logits (0, p)."""
        scores, logits = (_two(t, label) for t in (self.scores, self.logits))
        return Output(self.x, self.features, scores, logits, dict(self.memo))


def _two(p: Tensor, label: int) -> Tensor:
    return torch.stack((torch.zeros_like(p[:, label]), p[:, label]), dim=1)


class SplitModel(nn.Module):
    """Runs a model in eval mode under a normalisation policy and shows what goes in and out of its head."""

    def __init__(
        self, model: nn.Module, *, output: Callable[[Any], Tensor] | str | None = None, norm: str = "source"
    ) -> None:
        super().__init__()
        self.model = model
        self.output = output_function(output)
        self.norm = norm
        self.head: str | None = None
        self.channels = 0
        self.label: int | None = None
        self.dense = self.multilabel = self.twice = False
        self.selected: dict[str, nn.Parameter] = {}
        self.pixels: Normalization | None = None  # how its images were normalised, if that is known
        self.signature: Signature | None = None  # how the model is called in this batch, if not with one tensor
        self.engine = Engine()
        self.steps = Steps()
        self.caches: Caches | None = None  # not known before the first batch
        self._graph: Graph | None = None
        self._fitness, self._forgets, self._said = Fitness(), False, False
        self._moved: set[str] = set()  # weights that were laid out with channels last
        self.policy = nn.Module()  # what the policy of normalisation remembers beside the layers' own buffers
        self._pending: tuple[Rows, Tensor] | None = None
        self._reading = self._centred = self._learning = False
        self.train().eval()  # a change of mode empties the caches of models that keep some

    def attach(self, head: str | None, channels: int, *, dense: bool = False) -> None:
        """Fix the head by its name in the model, the number of its outputs, and whether these are maps."""
        self.head, self.channels, self.dense = head, channels, dense
        self.restart()

    def use(self, engine: Engine) -> None:
        """Run the model so from now on."""
        engine.suits(self.norm)
        engine.lay_out(self.model, self._moved)
        self.engine = engine
        self._graph = Graph() if engine.compile else None

    def restart(self) -> None:
        """Forget what the policy of normalisation remembers; the model must be at its source."""
        self._pending = None
        if self.norm == "robust":
            self.policy = Robust(self.model, None if self.dense or self.multilabel else self.channels)
            self.twice = self.policy.layers > 0
        elif policy_of(self.norm)[0] in ("batch", "mix", "prior"):
            self.policy = UsedStatistics(self.model)

    @property
    def scale(self) -> float:
        """What a loss is multiplied with before its gradient is worked out."""
        return self.steps.scale(self.engine.scale)

    @property
    def fewest(self) -> int:
        """How many values per channel a BatchNorm layer must see to use the batch's statistics."""
        return FEWEST if self.dense else 2

    @property
    def classes(self) -> int:
        """How many classes an image or a pixel may have; two for each label."""
        return self.channels if self.label is None else 2

    def of_label(self, label: int) -> SplitModel:
        """The same model as one of its labels sees it: a problem of two classes."""
        view = copy.copy(self)
        view.label = label
        return view

    def forward(self, x: Tensor, *, update: bool = False) -> Output:
        """One pass; `update` lets the normalisation policy keep what it estimates, else it only reads."""
        x, update = as_called(x, self.signature), update and not self._reading
        if self.engine.memory == "usual" or not torch.is_grad_enabled():
            return self._watched(x, update=update)
        # A block that turns out to be unfit is left out from then on, and the pass is taken again from the start.
        fitness = self._fitness
        parts = (self.model, self.policy)
        buffers = [(part, name, t.clone()) for part in parts for name, t in part.named_buffers()]
        fitness.ran, fitness.given = set() if self.norm.startswith("ema") else None, []
        try:
            with self._forgetting():
                out = self._watched(x, update=update)
            if written := fitness.written():
                raise UnfitError(written)
        except UnfitError as error:
            fitness.unfit |= error.blocks
            for part, name, t in buffers:
                part.get_buffer(name).copy_(t)
            return self.forward(x, update=update)
        finally:
            fitness.ran = fitness.given = None
        return out

    def _watched(self, x: Tensor, *, update: bool) -> Output:
        """One pass, whose rows are kept for robust estimates."""
        if not update or not isinstance(self.policy, Robust):
            return self._pass(x, update=update)
        with recording_rows(self.model) as rows:
            out = self._pass(x, update=update)
        self._pending = (rows, out.logits.detach())
        return out

    def inlier_rows(self, n: int) -> Tensor:
        """Which of the n images of the last pass robust estimates may learn from."""
        return inlier_rows(self._pending[0] if self._pending is not None else {}, n)

    def update_estimates(self) -> None:
        """Let robust estimates learn from the last pass; not before its gradient is known, which depends on them."""
        pending, self._pending = self._pending, None
        if isinstance(self.policy, Robust) and pending is not None:
            self.policy.learn(self.model, *pending)

    def _pass(self, x: Tensor, *, update: bool) -> Output:
        with self._statistics(len(x), update=update):
            answer, calls = self._run(x)
            logits = as_logits(answer, self.output, rows=len(x), least=1 if self.multilabel else 2)
            if len(calls) > 1:
                raise ValueError(f"the head {self.head!r} ran {len(calls)} times in one forward; name another")
            if self.head is not None and not calls:
                raise ValueError(f"the head {self.head!r} did not run in this forward; name another")
            shown = (seen_at(self.layer, *calls[0]) if self.dense else rows_of(*calls[0])) if calls else None
            features, scores = shown or (logits, logits)
            features, scores, logits = _promoted(features), _promoted(scores), _promoted(logits)
            # One look: a device is waited for once, before anything is remembered.
            fine = (_length(features) + _length(logits)).isfinite()
            if not self.steps.look(fine & usable(x) if devices.waits(x) else fine):
                check_values(x)
                raise NotFiniteError(
                    "the model's answer to this batch is not finite: the values are too large, "
                    "or adaptation went astray (reset() goes back, a smaller lr helps)"
                )
        out = Output(x, features, scores, logits)
        return out if self.label is None else out.of_label(self.label)

    __call__: Callable[..., Output]

    def _run(self, x: Tensor) -> tuple[Any, Calls]:
        """The model's answer, and what went in and out of its head."""
        placed, layer = self.engine.placed(x), self.layer if self.head is not None else None
        placed = x.with_images(placed) if isinstance(x, Batch) else placed
        with self.engine.running(x.device.type):
            if self._graph is not None and self._compiles(len(x)):
                return self._graph(self.model, layer, placed)
            model = self.plain()
            with recording_calls(layer) as calls:
                return call_model(model, placed), calls

    def _compiles(self, rows: int) -> bool:
        """Whether a batch of so many images runs as a graph; one of very few has statistics layer by layer."""
        if self._graph is None:
            return False
        many = self.norm == "source" or rows >= self.fewest
        if not many and not self._said:
            log.info("batches of less than %d images run without a graph, unless with norm='source'", self.fewest)
            self._said = True
        return many

    def _statistics(self, rows: int, *, update: bool) -> AbstractContextManager[None]:
        if self._compiles(rows):
            return batch_statistics(self.model) if self.norm == "batch" else nullcontext()
        used = self.policy if isinstance(self.policy, UsedStatistics) else None
        norm = "batch" if self._learning else self.norm
        return applying_policy(self.model, norm, update=update, fewest=self.fewest, centred=self._centred, used=used)

    @contextmanager
    def normalizing(self, rows: int) -> Iterator[None]:
        """The policy, for what runs outside of a forward of this class: recomputation in backward. It only reads."""
        with self._forgetting(), nullcontext() if self._compiles(rows) else self._statistics(rows, update=False):
            yield

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Blocks keep only what goes into them, if memory is to be low; also in models that recompute by themselves."""
        if self.engine.memory == "usual" or self._forgets:
            yield
            return
        self._forgets = True
        try:
            with recomputing(self.model, self.head, self._fitness, self.caches or Caches()):
                yield
        finally:
            self._forgets = False

    @contextmanager
    def centred(self) -> Iterator[None]:
        """In here statistics of the policy "instance" stand around the batch's moments, as in training."""
        before, self._centred = self._centred, True
        try:
            yield
        finally:
            self._centred = before

    @contextmanager
    def learning(self) -> Iterator[None]:
        """In here the statistics are the batch's, and nothing is kept."""
        before, self._learning = self._learning, True  # not the norm itself: a guard may restart in here
        try:
            with self.frozen_statistics():
                yield
        finally:
            self._learning = before

    @contextmanager
    def frozen_statistics(self) -> Iterator[None]:
        """No forward in here changes the policy's estimates."""
        before, self._reading = self._reading, True
        try:
            yield
        finally:
            self._reading = before

    @property
    def layer(self) -> nn.Module:
        """The head itself."""
        if self.head is None:
            raise HeadNotFoundError("this model has no head; name it with head=")
        return self.model.get_submodule(self.head)

    @property
    def weight(self) -> Tensor:
        """The head's effective weight (C, D); a kernel larger than one is summed over its taps."""
        weight = weight_of(self.layer)
        return weight if self.label is None else torch.stack((torch.zeros_like(weight[0]), weight[self.label]))

    def classify(self, features: Tensor) -> Tensor:
        """The head's scores of features (N, D)."""
        scores = classify(self.layer, features)
        return _promoted(scores if self.label is None else _two(scores, self.label))

    def plain(self) -> nn.Module:
        """The model itself, without what it has kept of earlier forwards."""
        if self.caches is not None:
            self.caches.forget(self.model)
        return self.model

    def clone(self) -> SplitModel:
        """A frozen copy with its own storage: a teacher, an anchor."""
        twin = copy.deepcopy(self)
        return twin.requires_grad_(False)


def _length(values: Tensor) -> Tensor:
    """The norm of all values: where it is finite, their sums and the norms of parts are, too."""
    length: Tensor = torch.linalg.vector_norm(values.detach())
    return length


def _promoted(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
