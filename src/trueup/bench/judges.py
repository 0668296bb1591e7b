"""Compare answers with the truth: one class per image, or masks on the images as they lie on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trueup.bench.metrics import accuracy, measure
from trueup.bench.overlap import measure as measure_masks
from trueup.bench.overlap import summary, vcdr
from trueup.data.loading import Place
from trueup.data.slices import SliceDomain, Volume, classes_on, labels_on

Indices = NDArray[np.int64]
Structures = Mapping[str, tuple[int, ...]]


class Judge(Protocol):
    """Takes answers as they come, and says in the end how good they were."""

    def take(self, logits: Tensor, indices: Indices) -> None:
        """The answers to a batch of images of the place."""
        ...

    def results(self) -> dict[str, Any]:
        """What they amount to."""
        ...


@dataclass
class ClassJudge:
    """Probabilities against classes."""

    place: Place
    probs: list[NDArray[np.float64]] = field(default_factory=list)
    indices: list[Indices] = field(default_factory=list)

    def take(self, logits: Tensor, indices: Indices) -> None:
        """Keep the probabilities."""
        self.probs.append(F.softmax(logits.double(), dim=1).numpy())
        self.indices.append(indices)

    def results(self) -> dict[str, Any]:
        """Accuracy and its kin, for all images and for each domain."""
        probs, at = np.concatenate(self.probs), np.concatenate(self.indices)
        labels, domains = self.place.labels[at], self.place.numbers[at]
        if not np.isfinite(probs).all():
            raise ValueError("the answers are not finite")
        results = measure(probs, labels)
        if len(self.place.domains) > 1:
            there = [(domain.name, domains == i) for i, domain in enumerate(self.place.domains)]
            results["per_domain"] = {name: accuracy(probs[i], labels[i]) for name, i in there if i.any()}
        return results


@dataclass
class _Seen:
    """What was said of a case so far: a mask of each structure, and which slices were shown."""

    found: dict[str, NDArray[np.bool_]]
    shown: NDArray[np.bool_]


@dataclass
class MaskJudge:
    """Masks against masks, case by case, at the resolution of the image on disk."""

    place: Place
    structures: Structures
    multilabel: bool = False
    seen: dict[tuple[int, int], _Seen] = field(default_factory=dict)
    images: int = 0

    def take(self, logits: Tensor, indices: Indices) -> None:
        """Put each answer back on its slice."""
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the answers are not finite")
        self.images += len(indices)
        numbers = self.place.numbers
        for answer, index in zip(logits, indices.tolist(), strict=True):
            domain, i = self.place.find(index)
            assert isinstance(domain, SliceDomain)
            number, z = domain.place(i)
            volume = domain.volume(number)
            key = int(numbers[index]), number
            if key not in self.seen:
                shape = volume.image.shape[:3]
                empty = {name: np.zeros(shape, dtype=np.bool_) for name in self.structures}
                self.seen[key] = _Seen(empty, np.zeros(shape[0], dtype=np.bool_))
            self.seen[key].shown[z] = True
            for name, mask in regions(answer, volume, self.structures, multilabel=self.multilabel).items():
                self.seen[key].found[name][z] = mask

    def results(self) -> dict[str, Any]:
        """Dice and distances: mean over cases, then over structures; also of each case and domain."""
        cases: dict[str, dict[str, dict[str, float | None]]] = {}
        groups: dict[str, list[dict[str, dict[str, float | None]]]] = {}
        ratios: list[float] = []
        for (d, number), seen in sorted(self.seen.items()):
            domain = self.place.domains[d]
            assert isinstance(domain, SliceDomain)
            volume = domain.volume(number)
            assert volume.mask is not None
            # What was not shown counts as empty in both, so that slices keep their distances.
            shown = seen.shown[:, None, None]
            truth = {name: np.isin(volume.mask, part) & shown for name, part in self.structures.items()}
            case = measure_masks(seen.found, truth, volume.spacing)
            name = domain.cases[number].name
            name = name if len(self.place.domains) == 1 else f"{domain.name}/{name}"
            cases[name if name not in cases else f"{name} ({number})"] = case  # two parts may use a name twice
            groups.setdefault(domain.name, []).append(case)
            if {"disc", "cup"} <= truth.keys():
                ratios.append(abs(_ratio(seen.found) - _ratio(truth)))
        results: dict[str, Any] = {**summary(list(cases.values())), "images": self.images, "per_case": cases}
        if ratios:
            errors = [error for error in ratios if np.isfinite(error)]
            results["vcdr_error"] = float(np.mean(errors)) if errors else None
            results["vcdr_undefined"] = len(ratios) - len(errors)  # no disc was found
        if len(groups) > 1:
            results["per_domain"] = {name: summary(group)["dice"] for name, group in groups.items()}
        return results


def _ratio(masks: Mapping[str, NDArray[np.bool_]]) -> float:
    return vcdr(masks["disc"][0], masks["cup"][0])


def regions(
    answer: Tensor, volume: Volume, structures: Structures, *, multilabel: bool
) -> dict[str, NDArray[np.bool_]]:
    """The mask of each structure (H, W) that an answer (C, size, size) means, on the whole slice."""
    if multilabel:
        return dict(zip(structures, labels_on(volume, answer), strict=True))
    classes = classes_on(volume, answer)
    return {name: np.isin(classes, part) for name, part in structures.items()}
