"""A model split at its head: features before the last linear layer, scores after it, logits as the model gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.augment import Pixels
from trueup.core.robust import Robust, Rows, usual, watching
from trueup.core.statistics import normalizing

HEADS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# A segmenter's layer that sees fewer values per channel than this keeps the source's statistics: DeepLab pools a whole
# image into one value, and the deviation of a batch of few such values is noise.
FEWEST = 16


class HeadNotFoundError(ValueError):
    """No linear layer's output is the model's logits."""


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
        self, model: nn.Module, *, output: Callable[[Any], Tensor] | None = None, norm: str = "source"
    ) -> None:
        super().__init__()
        self.model = model
        self.output = output
        self.norm = norm
        self.head: str | None = None
        self.channels = 0
        self.label: int | None = None
        self.dense = self.multilabel = self.twice = False
        self.selected: dict[str, nn.Parameter] = {}
        self.pixels: Pixels | None = None  # how its images were normalised, if that is known
        self.policy = nn.Module()  # what the policy of normalisation remembers beside the layers' own buffers
        self._pending: tuple[Rows, Tensor] | None = None
        self._reading = self._centred = False

    def attach(self, head: str | None, channels: int, *, dense: bool = False) -> None:
        """Fix the head by its name in the model, the number of its outputs, and whether these are maps."""
        self.head, self.channels, self.dense = head, channels, dense
        self.restart()

    def restart(self) -> None:
        """Forget what the policy of normalisation remembers; the model must be at its source."""
        self._pending = None
        if self.norm == "robust":
            self.policy = Robust(self.model, None if self.dense or self.multilabel else self.channels)
            self.twice = self.policy.layers > 0

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
        update = update and not self._reading
        if not update or not isinstance(self.policy, Robust):
            return self._pass(x, update=update)
        with watching(self.model) as rows:
            out = self._pass(x, update=update)
        self._pending = (rows, out.logits.detach())
        return out

    def usual_rows(self, n: int) -> Tensor:
        """Which of the n images of the last pass robust estimates may learn from."""
        return usual(self._pending[0] if self._pending is not None else {}, n)

    def settle(self) -> None:
        """Let robust estimates learn from the last pass; not before its gradient is known, which depends on them."""
        pending, self._pending = self._pending, None
        if isinstance(self.policy, Robust) and pending is not None:
            self.policy.learn(self.model, *pending)

    def _pass(self, x: Tensor, *, update: bool) -> Output:
        calls: list[tuple[Tensor, Tensor]] = []
        handles = []
        if self.head is not None:
            layer = self.model.get_submodule(self.head)
            handles.append(layer.register_forward_hook(lambda _, args, out: calls.append((args[0], out))))
        try:
            with self._following(update=update):
                logits = self._run(x)
                if len(calls) > 1:
                    raise ValueError(f"the head {self.head!r} ran {len(calls)} times in one forward; name another")
                if self.head is not None and not calls:
                    raise ValueError(f"the head {self.head!r} did not run in this forward; name another")
                features, scores = (calls[0] if self.dense else _rows(*calls[0])) if calls else (logits, logits)
                features, scores, logits = _promoted(features), _promoted(scores), _promoted(logits)
                if not bool((_length(features) + _length(logits)).isfinite()):
                    raise ValueError(
                        "the model's answer to this batch is not finite: the values are too large, "
                        "or adaptation went astray (reset() goes back, a smaller lr helps)"
                    )
        finally:
            for handle in handles:
                handle.remove()
        out = Output(x, features, scores, logits)
        return out if self.label is None else out.of_label(self.label)

    __call__: Callable[..., Output]

    def _run(self, x: Tensor) -> Tensor:
        return as_logits(run(self.model, x), self.output, rows=len(x), least=1 if self.multilabel else 2)

    def normalizing(self) -> AbstractContextManager[None]:
        """The policy, for what runs outside of a forward of this class: recomputation in backward. It only reads."""
        return self._following(update=False)

    def _following(self, *, update: bool) -> AbstractContextManager[None]:
        return normalizing(self.model, self.norm, update=update, fewest=self.fewest, centred=self._centred)

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
        before, self.norm = self.norm, "batch"
        try:
            with self.reading():
                yield
        finally:
            self.norm = before

    @contextmanager
    def reading(self) -> Iterator[None]:
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
        weight = self._weight
        return weight if self.label is None else torch.stack((torch.zeros_like(weight[0]), weight[self.label]))

    @property
    def _weight(self) -> Tensor:
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return weight.flatten(2).sum(dim=2) if weight.ndim > 2 else weight

    def classify(self, features: Tensor) -> Tensor:
        """The head's scores of features (N, D)."""
        weight, bias = self._weight, self.layer.bias
        assert bias is None or isinstance(bias, Tensor)
        features = features.to(weight.dtype)
        scores = self.layer(features) if isinstance(self.layer, nn.Linear) else F.linear(features, weight, bias)
        return _promoted(scores if self.label is None else _two(scores, self.label))

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


def run(model: nn.Module, x: Tensor) -> Any:
    """The model's answer; what torch says of an unfit input becomes a ValueError that shows the input."""
    try:
        return model(x.clone())  # a model may change its input in place
    except (RuntimeError, IndexError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        shape = tuple(x.shape[1:])
        raise ValueError(f"the model cannot take images of shape {shape}, {x.dtype} on {x.device}: {error}") from error


def as_logits(answer: Any, output: Callable[[Any], Tensor] | None, rows: int, least: int = 2) -> Tensor:
    """The logits in what a model returned: a tensor, a dict's "out" or "logits", an object's `.logits`."""
    if output is not None:
        answer = output(answer)
    elif isinstance(answer, dict) and ("out" in answer or "logits" in answer):
        answer = answer["out"] if "out" in answer else answer["logits"]
    elif not isinstance(answer, Tensor):
        answer = getattr(answer, "logits", answer)
    if not isinstance(answer, Tensor):
        raise ValueError(
            f"the model returned {type(answer).__name__}; pass output=, a function from what it returns to the logits"
        )
    if answer.ndim < 2 or len(answer) != rows or answer.shape[1] < least or not answer.is_floating_point():
        hint = "; multilabel=True if each channel is a label of its own" if answer.ndim > 1 == answer.shape[1] else ""
        raise ValueError(
            f"for {rows} inputs the model returned {tuple(answer.shape)} {answer.dtype}; "
            f"logits must be floating point of shape ({rows}, classes, ...) with at least two classes{hint}"
        )
    return answer


@torch.no_grad()
def find_head(
    model: nn.Module,
    x: Tensor,
    *,
    name: str | None = None,
    output: Callable[[Any], Tensor] | None = None,
    strict: bool = True,
    least: int = 2,
) -> tuple[str, Tensor]:
    """Probe a model with x: the name of its head, the last linear layer whose output is the logits, and the logits.

    With `name` that layer is checked instead of searched for; `strict=False` lets it be one whose features cannot be
    used, because it sees maps where the model gives one answer per image. `least` is the fewest outputs it may have.
    """
    layers: dict[nn.Module, str] = {module: path for path, module in model.named_modules() if isinstance(module, HEADS)}
    if name is not None and name not in layers.values():
        last = ", ".join(list(layers.values())[-3:])
        raise HeadNotFoundError(f"head={name!r} is no linear or convolution layer of the model; its last are: {last}")
    calls, logits = _watch(model, x, layers, output, least)
    paths = [path for path, *_ in calls]
    for path, layer, inp, out in reversed(calls):
        fits = _width(layer) == logits.shape[1] and (_aligned(layer, inp, out, logits) or not (strict or name is None))
        found = path == name if name is not None else paths.count(path) == 1 and _becomes(out, logits)
        if fits and found:
            return path, logits
    if name is not None:
        shapes = [tuple(out.shape) for path, _, _, out in calls if path == name] or "nothing"
        raise HeadNotFoundError(f"head={name!r} gives {shapes} for logits {tuple(logits.shape)}: it cannot be the head")
    named = [path for path, layer, *_ in calls if _width(layer) == logits.shape[1]] or paths[-3:]
    raise HeadNotFoundError(
        f"no linear layer's output is the model's logits (something follows it, or several are combined); "
        f"candidates: {', '.join(dict.fromkeys(named)) or 'none'}; name one with head=, if it sees one feature vector "
        f"per image"
    )


def _watch(
    model: nn.Module, x: Tensor, layers: dict[nn.Module, str], output: Callable[[Any], Tensor] | None, least: int
) -> tuple[list[tuple[str, nn.Module, Tensor, Tensor]], Tensor]:
    """One forward: what went in and out of the layers, in the order of their calls, and the logits."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def note(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if args:  # a copy, so that what is done to the output in place afterwards shows
            calls.append((layers[layer], layer, args[0], out.clone()))

    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        return calls, as_logits(run(model, x), output, rows=len(x), least=least)
    finally:
        for handle in handles:
            handle.remove()


def _width(layer: nn.Module) -> int:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _aligned(layer: nn.Module, inp: Tensor, out: Tensor, logits: Tensor) -> bool:
    """Whether the layer sees one feature vector per image where there is one answer per image, else a map of them."""
    if getattr(layer, "groups", 1) > 1:
        return False
    if logits.ndim > 2:
        return inp.ndim == out.ndim == logits.ndim and inp.shape[2:] == out.shape[2:]
    features, scores = _rows(inp, out)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return features.shape == (len(logits), weight.shape[1]) and scores.shape == logits.shape


def _becomes(out: Tensor, logits: Tensor) -> bool:
    """Whether the logits are this output, flattened or resized."""
    if out.numel() == logits.numel():
        return torch.equal(out.reshape(logits.shape), logits)
    if out.ndim != 4 or logits.ndim != 4 or out.shape[:2] != logits.shape[:2]:
        return False
    coarse = torch.finfo(out.dtype).eps > 1e-5 or torch.finfo(logits.dtype).eps > 1e-5  # under autocast
    size, out, logits = logits.shape[2:], out.float(), logits.float()
    resized = [F.interpolate(out, size=size, mode="nearest")]
    resized += [F.interpolate(out, size=size, mode="bilinear", align_corners=corners) for corners in (False, True)]
    rtol, atol = (2e-2, 1e-2) if coarse else (1e-4, 1e-5)
    return any(torch.allclose(each, logits, rtol=rtol, atol=atol) for each in resized)


def _rows(features: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Drop spatial axes of size one on both sides of the head: (N, D, 1, 1) and (N, 1, 1, D) become (N, D)."""
    if features.numel() == len(features) * max(features.shape[1:]) and scores.numel() == len(scores) * max(
        scores.shape[1:]
    ):
        return features.flatten(1), scores.flatten(1)
    return features, scores
