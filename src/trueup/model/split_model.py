"""A model split at its head: features before the last linear layer, scores after it, logits as the model gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trueup.model.calls import as_called
from trueup.model.head_errors import HeadNotFoundError
from trueup.model.readout import classify, features_and_scores, weight_of
from trueup.model.runner import Runner, RunSettings
from trueup.norm import make_policy
from trueup.views import Normalization


@dataclass(frozen=True)
class Output:
    """One forward pass: `features` (N, D) and `scores` (N, C) at the head, `logits` as the model returns them.

    A segmenter's are maps, (N, D, H, W), at the resolution of its head; its logits may be larger. All are at
    least float32, so losses are too. Where the model has no head, features and scores are the logits. `memo` is
    scratch space of this call.
    """

    x: Tensor
    features: Tensor
    scores: Tensor
    logits: Tensor
    memo: dict[str, Any] = field(default_factory=dict)

    def flat(self) -> tuple[Tensor, Tensor]:
        """Return features and scores with one row per image or pixel: image after image, pixels in their order."""
        rows = (t.movedim(1, -1).reshape(-1, t.shape[1]) for t in (self.features, self.scores))
        return next(rows), next(rows)

    def of_label(self, label: int) -> Output:
        """Return the output of one label of a multi-label model: two classes with the logits (0, p)."""
        scores, logits = (_two_classes(t, label) for t in (self.scores, self.logits))
        return Output(self.x, self.features, scores, logits, dict(self.memo))


def _two_classes(logits: Tensor, label: int) -> Tensor:
    return torch.stack((torch.zeros_like(logits[:, label]), logits[:, label]), dim=1)


class SplitModel(nn.Module):
    """A model in eval mode, under a normalisation policy, whose forward also returns features and scores."""

    def __init__(
        self, model: nn.Module, *, output: Callable[[Any], Tensor] | str | None = None, norm: str = "source",
        multilabel: bool = False, normalization: Normalization | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.runner = Runner(model, output)
        self.policy = make_policy(norm)
        self.head: str | None = None
        self.channels = 0
        self.dense = False
        self.multilabel = multilabel
        self.label: int | None = None
        self.selected: dict[str, nn.Parameter] = {}
        self.normalization = normalization  # of its images, if that is known
        self.train().eval()  # train() and eval() make some models drop cached tensors

    def attach(self, head: str | None, channels: int, *, dense: bool = False) -> None:
        """Set the name of the head, the number of its outputs, and whether these are maps."""
        self.head, self.channels, self.dense = head, channels, dense
        self.restart()

    def restart(self) -> None:
        """Forget all that the normalisation policy remembers; the model must have the source's weights."""
        classes = None if self.dense or self.multilabel else self.channels
        self.policy.restart(self.model, classes=classes, dense=self.dense)

    def use(self, settings: RunSettings) -> None:
        """Run the model with these settings from now on."""
        self.runner.use(settings, self.policy)

    # The head

    @property
    def layer(self) -> nn.Module:
        """The head itself."""
        if self.head is None:
            raise HeadNotFoundError("this model has no head; name it with head=")
        return self.model.get_submodule(self.head)

    @property
    def classes(self) -> int:
        """The number of classes of an image or a pixel: two for a single label."""
        return self.channels if self.label is None else 2

    @property
    def weight(self) -> Tensor:
        """The head's effective weight (C, D); a kernel larger than one is summed over its taps."""
        weight = weight_of(self.layer)
        return weight if self.label is None else torch.stack((torch.zeros_like(weight[0]), weight[self.label]))

    def classify(self, features: Tensor) -> Tensor:
        """Return the head's scores of features (N, D)."""
        scores = classify(self.layer, features)
        return _promoted(scores if self.label is None else _two_classes(scores, self.label))

    # A forward pass

    def forward(self, x: Tensor, *, update: bool = False) -> Output:
        """Run the model once; `update` lets the normalisation policy remember the batch, otherwise it only reads."""
        x, update = as_called(x, self.runner.signature), update and not self.policy.frozen
        return self.runner.run_with_retry(lambda: self._forward(x, update=update), self.head, self.policy)

    __call__: Callable[..., Output]

    def _forward(self, x: Tensor, *, update: bool) -> Output:
        policy, layer = self.policy, None if self.head is None else self.layer
        graph = self.runner.uses_graph(len(x), policy)
        with policy.in_graph(self.model) if graph else policy.forward_pass(self.model, update=update):
            logits, calls = self.runner.run(x, layer, policy, 1 if self.multilabel else 2)
            features, scores, logits = (_promoted(t) for t in (*self._at_head(layer, calls, logits), logits))
            self.runner.check_finite(x, features, logits)  # before anything is remembered
        if update:
            policy.note_logits(logits.detach())
        out = Output(x, features, scores, logits)
        return out if self.label is None else out.of_label(self.label)

    def _at_head(
        self, layer: nn.Module | None, calls: list[tuple[Tensor, Tensor]], logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return features and scores of the head's one call; the logits for both if there is no head."""
        if layer is None:
            return logits, logits
        if len(calls) != 1:
            runs = f"ran {len(calls)} times in one forward" if calls else "did not run in this forward"
            raise ValueError(f"the head {self.head!r} {runs}; name another")
        return features_and_scores(layer, *calls[0]) if self.dense else rows_of(*calls[0])

    # Normalisation

    @contextmanager
    def active(self, rows: int, *, learning: bool = False) -> Iterator[None]:
        """Keep the policy's hooks registered for all passes of a batch, including recomputation in backward.

        rows: the number of images, as tiny batches do not run compiled. learning: the second pass of a two-pass policy.
        """
        mode = self.policy.having(learning=True, frozen=True) if learning else nullcontext()
        graph = self.runner.uses_graph(rows, self.policy)
        hooks = nullcontext() if graph else self.policy.active(self.model)
        with mode, self.runner.recomputing(self.head), hooks:
            yield

    def frozen_statistics(self) -> AbstractContextManager[None]:
        """Freeze the policy's estimates."""
        return self.policy.having(frozen=True)

    def centred(self) -> AbstractContextManager[None]:
        """Let the policy "instance" use the batch's moments, as in training."""
        return self.policy.having(centred=True)

    def update_estimates(self) -> None:
        """Update robust estimates from the last pass; call it after backward, which depends on them."""
        self.policy.update_estimates(self.model)

    # Copies

    def registries(self) -> list[dict[str, Any]]:
        """Return the attribute dicts that hold all state beside the model's tensors, to restore it after a failure."""
        runner, policy = self.runner, self.policy
        owned = [vars(each) for each in (self, runner, runner.steps, runner.blocks, policy)]
        return [*owned, self._modules, policy._buffers]

    def of_label(self, label: int) -> SplitModel:
        """Return a view of the same model as a problem of two classes: is a label there or not."""
        view = copy.copy(self)
        view.label = label
        return view

    def clone(self) -> SplitModel:
        """Return a frozen copy with its own storage: a teacher, an anchor."""
        return copy.deepcopy(self).requires_grad_(False)


def rows_of(features: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Drop spatial axes of size one on both sides of the head: (N, D, 1, 1) and (N, 1, 1, D) become (N, D)."""
    vectors = all(t.numel() == len(t) * max(t.shape[1:]) for t in (features, scores))
    return (features.flatten(1), scores.flatten(1)) if vectors else (features, scores)


def _promoted(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
