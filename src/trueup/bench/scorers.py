"""Metrics of classification, and scorers: they compare classes with labels, or masks at the resolution on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trueup.bench.mask_metrics import dice_coefficient, measure_masks, summarize_cases, vcdr
from trueup.data.loading import ConcatDomains
from trueup.data.slices import SliceDomain, Volume, class_mask, label_masks

Indices = NDArray[np.int64]
Structures = Mapping[str, tuple[int, ...]]
Regions = Mapping[str, NDArray[np.bool_]]
Probs = NDArray[np.float64]
Pixels = NDArray[np.uint8]
EXAMPLES, SIDE = 3, 256  # images kept as examples, and the most pixels of a side


def accuracy(probs: Probs, labels: Indices) -> float:
    """Return the share of correct predictions."""
    return float(np.mean(probs.argmax(axis=1) == labels))


def per_class(probs: Probs, labels: Indices, classes: int) -> list[float | None]:
    """Return the accuracy of each class; None for a class without images."""
    right = probs.argmax(axis=1) == labels
    return [float(right[labels == k].mean()) if (labels == k).any() else None for k in range(classes)]


def calibration_error(probs: Probs, labels: Indices, bins: int = 15) -> float:
    """Return the expected calibration error: |accuracy - confidence| in equal-width bins, weighted by size."""
    confidence, right = probs.max(axis=1), probs.argmax(axis=1) == labels
    which = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = [abs(float(right[which == b].sum()) - float(confidence[which == b].sum())) for b in range(bins)]
    return sum(gaps) / len(labels)


def negative_log_likelihood(probs: Probs, labels: Indices) -> float:
    """Return the mean of -log p of the true class; p is clipped at 1e-12."""
    return float(-np.log(np.clip(probs[np.arange(len(labels)), labels], 1e-12, None)).mean())


def measure_classes(probs: Probs, labels: Indices) -> dict[str, Any]:
    """Return all metrics of a run."""
    each = per_class(probs, labels, probs.shape[1])
    defined = [value for value in each if value is not None]
    return {
        "accuracy": accuracy(probs, labels),
        "macro": sum(defined) / len(defined),
        "per_class": each,
        "ece": calibration_error(probs, labels),
        "nll": negative_log_likelihood(probs, labels),
        "images": len(labels),
    }


@dataclass
class ClassScorer:
    """A scorer of class probabilities."""

    data: ConcatDomains
    probs: list[Probs] = field(default_factory=list)
    indices: list[Indices] = field(default_factory=list)

    def take(self, logits: Tensor, indices: Indices) -> None:
        """Add the answers to a batch."""
        self.probs.append(F.softmax(logits.double(), dim=1).numpy())
        self.indices.append(indices)

    def results(self) -> dict[str, Any]:
        """Return accuracy and related metrics, for all images and for each domain."""
        probs, at = np.concatenate(self.probs), np.concatenate(self.indices)
        labels, domains = self.data.labels[at], self.data.numbers[at]
        if not np.isfinite(probs).all():
            raise ValueError("the answers are not finite")
        results = measure_classes(probs, labels)
        if len(self.data.domains) > 1:
            masks = [(domain.name, domains == i) for i, domain in enumerate(self.data.domains)]
            results["per_domain"] = {name: accuracy(probs[i], labels[i]) for name, i in masks if i.any()}
        return results

    def trace(self) -> dict[str, NDArray[Any]]:
        """Return label, prediction, entropy in nats and confidence of each image, in stream order."""
        found: dict[str, list[NDArray[Any]]] = {"prediction": [], "entropy": [], "confidence": []}
        for probs in self.probs:  # batch by batch, to save memory with many classes
            found["prediction"].append(probs.argmax(axis=1).astype(np.int16))
            entropy = -(probs * np.log(np.clip(probs, 1e-30, None))).sum(axis=1)
            found["entropy"].append(entropy.astype(np.float32))
            found["confidence"].append(probs.max(axis=1).astype(np.float32))
        return {
            **_positions(self.data, self.indices),
            "label": self.data.labels[np.concatenate(self.indices)].astype(np.int16),
            **{name: np.concatenate(parts) for name, parts in found.items()},
        }


def _positions(data: ConcatDomains, batches: Sequence[Indices]) -> dict[str, NDArray[Any]]:
    """Return image, domain and batch of each answer."""
    at = np.concatenate(batches)
    return {
        "image": at.astype(np.int32),
        "domain": data.numbers[at].astype(np.int16),
        "batch": np.repeat(np.arange(len(batches), dtype=np.int32), [len(batch) for batch in batches]),
    }


@dataclass
class MaskScorer:
    """A scorer of masks, case by case, at the resolution of the image on disk."""

    data: ConcatDomains
    structures: Structures
    multilabel: bool = False
    found: dict[tuple[int, int], dict[str, NDArray[np.bool_]]] = field(default_factory=dict)
    """The predicted mask of each structure so far, by the number of the domain and of the case."""
    shown: dict[tuple[int, int], NDArray[np.bool_]] = field(default_factory=dict)
    """The slices of each case that were shown."""
    indices: list[Indices] = field(default_factory=list)
    dices: list[float] = field(default_factory=list)
    last: deque[tuple[str, Pixels, Pixels, Pixels]] = field(default_factory=lambda: deque(maxlen=EXAMPLES))
    """The last images: name, image, and masks of truth and answer."""

    def take(self, logits: Tensor, indices: Indices) -> None:
        """Add the answers to a batch, each resized to its slice."""
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the answers are not finite")
        self.indices.append(indices)
        numbers = self.data.numbers
        for answer, index in zip(logits, indices.tolist(), strict=True):
            domain, i = self.data.find(index)
            assert isinstance(domain, SliceDomain)
            number, z = domain.place(i)
            volume = domain.volume(number)
            key = int(numbers[index]), number
            if key not in self.found:
                shape = volume.image.shape[:3]
                self.found[key] = {name: np.zeros(shape, dtype=np.bool_) for name in self.structures}
                self.shown[key] = np.zeros(shape[0], dtype=np.bool_)
            self.shown[key][z] = True
            found = regions(answer, volume, self.structures, multilabel=self.multilabel)
            for name, mask in found.items():
                self.found[key][name][z] = mask
            assert volume.mask is not None
            truth = {name: np.isin(volume.mask[z], part) for name, part in self.structures.items()}
            self.dices.append(mean_dice(found, truth))
            image = shrink(to_rgb(volume.image[z]))
            self.last.append((domain.image_name(i), image, _layers(truth), _layers(found)))

    def results(self) -> dict[str, Any]:
        """Return Dice and distances: mean over cases, then over structures; also per case and domain."""
        cases: dict[str, dict[str, dict[str, float | None]]] = {}
        groups: dict[str, list[dict[str, dict[str, float | None]]]] = {}
        ratios: list[float] = []
        for d, number in sorted(self.found):
            domain, found = self.data.domains[d], self.found[d, number]
            assert isinstance(domain, SliceDomain)
            volume = domain.volume(number)
            assert volume.mask is not None
            # Slices that were not shown count as empty in both, so that slices keep their distances.
            shown = self.shown[d, number][:, None, None]
            truth = {name: np.isin(volume.mask, part) & shown for name, part in self.structures.items()}
            case = measure_masks(found, truth, volume.spacing)
            name = domain.cases[number].name
            name = name if len(self.data.domains) == 1 else f"{domain.name}/{name}"
            cases[name if name not in cases else f"{name} ({number})"] = case  # two parts of a dataset may share a name
            groups.setdefault(domain.name, []).append(case)
            if {"disc", "cup"} <= truth.keys():
                ratios.append(abs(_ratio(found) - _ratio(truth)))
        results: dict[str, Any] = {
            **summarize_cases(list(cases.values())),
            "images": sum(map(len, self.indices)),
            "per_case": cases,
        }
        if ratios:
            errors = [error for error in ratios if np.isfinite(error)]
            results["vcdr_error"] = float(np.mean(errors)) if errors else None
            results["vcdr_undefined"] = len(ratios) - len(errors)  # no disc was found
        if len(groups) > 1:
            results["per_domain"] = {name: summarize_cases(group)["dice"] for name, group in groups.items()}
        return results

    def trace(self) -> dict[str, NDArray[Any]]:
        """Return the Dice of each image in stream order, and the last images with true and predicted masks."""
        names, images, truths, answers = zip(*self.last, strict=True)
        return {
            **_positions(self.data, self.indices),
            "dice": np.array(self.dices, dtype=np.float32),
            "examples": stack_padded(images),
            "truth": np.moveaxis(stack_padded(truths), -1, 1),
            "answer": np.moveaxis(stack_padded(answers), -1, 1),
            "example_names": np.array(names),
            "structures": np.array(list(self.structures)),
        }


def _layers(masks: Regions) -> Pixels:
    return np.stack([shrink(mask.astype(np.uint8)) for mask in masks.values()], axis=-1)


def shrink(image: Pixels) -> Pixels:
    """Subsample an image to at most SIDE pixels a side."""
    step = -(-max(image.shape[:2]) // SIDE)
    return image[::step, ::step]


def stack_padded(images: Sequence[Pixels]) -> Pixels:
    """Stack images (H, W, C) of several sizes; smaller ones get a black margin."""
    height, width = (max(image.shape[i] for image in images) for i in (0, 1))
    stacked = np.zeros((len(images), height, width, images[0].shape[2]), dtype=np.uint8)
    for space, image in zip(stacked, images, strict=True):
        space[: image.shape[0], : image.shape[1]] = image
    return stacked


def mean_dice(found: Regions, truth: Regions) -> float:
    """Return the mean Dice of the structures in truth or answer; NaN if there are none."""
    each = [value for name in truth if not np.isnan(value := dice_coefficient(found[name], truth[name]))]
    return float(np.mean(each)) if each else float("nan")


def to_rgb(image: Pixels) -> Pixels:
    """Convert a grey or colour image (H, W, 1 or 3) to colour."""
    return np.repeat(image, 4 - image.shape[2], axis=2)[..., :3]


def _ratio(masks: Mapping[str, NDArray[np.bool_]]) -> float:
    return vcdr(masks["disc"][0], masks["cup"][0])


def regions(
    answer: Tensor, volume: Volume, structures: Structures, *, multilabel: bool
) -> dict[str, NDArray[np.bool_]]:
    """Convert logits (C, size, size) to a mask (H, W) of each structure on the full slice."""
    if multilabel:
        return dict(zip(structures, label_masks(volume, answer), strict=True))
    classes = class_mask(volume, answer)
    return {name: np.isin(classes, part) for name, part in structures.items()}


Scorer = ClassScorer | MaskScorer
