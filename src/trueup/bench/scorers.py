"""Compare answers with the truth: one class per image, or masks on the images as they lie on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trueup.bench.class_metrics import accuracy, measure
from trueup.bench.mask_metrics import dice, summary, vcdr
from trueup.bench.mask_metrics import measure as measure_masks
from trueup.data.loading import ConcatDomains
from trueup.data.slices import SliceDomain, Volume, class_mask, label_masks

Indices = NDArray[np.int64]
Structures = Mapping[str, tuple[int, ...]]
Regions = Mapping[str, NDArray[np.bool_]]
EXAMPLES, SIDE = 3, 256  # images of a stream that are kept to be looked at, and the most pixels of a side


class Judge(Protocol):
    """Takes answers as they come, and says in the end how good they were."""

    def take(self, logits: Tensor, indices: Indices) -> None:
        """The answers to a batch of images of the place."""
        ...

    def results(self) -> dict[str, Any]:
        """What they amount to."""
        ...

    def trace(self) -> dict[str, NDArray[Any]]:
        """What was said of each image, in the order of the stream."""
        ...


@dataclass
class ClassJudge:
    """Probabilities against classes."""

    place: ConcatDomains
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

    def trace(self) -> dict[str, NDArray[Any]]:
        """Label, prediction, entropy in nats and confidence of each image."""
        found: dict[str, list[NDArray[Any]]] = {"prediction": [], "entropy": [], "confidence": []}
        for probs in self.probs:  # one batch at a time: with many images and classes copies of all would be large
            found["prediction"].append(probs.argmax(axis=1).astype(np.int16))
            entropy = -(probs * np.log(np.clip(probs, 1e-30, None))).sum(axis=1)
            found["entropy"].append(entropy.astype(np.float32))
            found["confidence"].append(probs.max(axis=1).astype(np.float32))
        return {
            **_places(self.place, self.indices),
            "label": self.place.labels[np.concatenate(self.indices)].astype(np.int16),
            **{name: np.concatenate(parts) for name, parts in found.items()},
        }


def _places(place: ConcatDomains, batches: Sequence[Indices]) -> dict[str, NDArray[Any]]:
    """Which image it was, of which domain, in which batch."""
    at = np.concatenate(batches)
    return {
        "image": at.astype(np.int32),
        "domain": place.numbers[at].astype(np.int16),
        "batch": np.repeat(np.arange(len(batches), dtype=np.int32), [len(batch) for batch in batches]),
    }


@dataclass
class _Seen:
    """What was said of a case so far: a mask of each structure, and which slices were shown."""

    found: dict[str, NDArray[np.bool_]]
    shown: NDArray[np.bool_]


@dataclass(frozen=True)
class _Example:
    """An image, and its structures as they are and as they were found."""

    name: str
    image: NDArray[np.uint8]
    truth: Regions
    found: Regions


@dataclass
class MaskJudge:
    """Masks against masks, case by case, at the resolution of the image on disk."""

    place: ConcatDomains
    structures: Structures
    multilabel: bool = False
    seen: dict[tuple[int, int], _Seen] = field(default_factory=dict)
    indices: list[Indices] = field(default_factory=list)
    dices: list[float] = field(default_factory=list)
    last: list[_Example] = field(default_factory=list)

    def take(self, logits: Tensor, indices: Indices) -> None:
        """Put each answer back on its slice."""
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the answers are not finite")
        self.indices.append(indices)
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
            found = regions(answer, volume, self.structures, multilabel=self.multilabel)
            for name, mask in found.items():
                self.seen[key].found[name][z] = mask
            assert volume.mask is not None
            truth = {name: np.isin(volume.mask[z], part) for name, part in self.structures.items()}
            self.dices.append(mean_dice(found, truth))
            self.last.append(_Example(domain.image_name(i), coloured(volume.image[z]), truth, found))
            del self.last[:-EXAMPLES]

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
        results: dict[str, Any] = {
            **summary(list(cases.values())),
            "images": sum(map(len, self.indices)),
            "per_case": cases,
        }
        if ratios:
            errors = [error for error in ratios if np.isfinite(error)]
            results["vcdr_error"] = float(np.mean(errors)) if errors else None
            results["vcdr_undefined"] = len(ratios) - len(errors)  # no disc was found
        if len(groups) > 1:
            results["per_domain"] = {name: summary(group)["dice"] for name, group in groups.items()}
        return results

    def trace(self) -> dict[str, NDArray[Any]]:
        """Dice of each image, and the last images with the masks that are true and found."""
        return {
            **_places(self.place, self.indices),
            "dice": np.array(self.dices, dtype=np.float32),
            "examples": stacked([shrunk(example.image) for example in self.last]),
            "truth": np.moveaxis(stacked([_layers(example.truth) for example in self.last]), -1, 1),
            "answer": np.moveaxis(stacked([_layers(example.found) for example in self.last]), -1, 1),
            "example_names": np.array([example.name for example in self.last]),
            "structures": np.array(list(self.structures)),
        }


def _layers(masks: Regions) -> NDArray[np.uint8]:
    return np.stack([shrunk(mask.astype(np.uint8)) for mask in masks.values()], axis=-1)


def shrunk(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An image of at most SIDE pixels a side, by leaving out rows and columns."""
    step = -(-max(image.shape[:2]) // SIDE)
    return image[::step, ::step]


def stacked(images: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Images (H, W, C) of several sizes as one array; the smaller ones have a black margin."""
    height, width = (max(image.shape[i] for image in images) for i in (0, 1))
    whole = np.zeros((len(images), height, width, images[0].shape[2]), dtype=np.uint8)
    for space, image in zip(whole, images, strict=True):
        space[: image.shape[0], : image.shape[1]] = image
    return whole


def mean_dice(found: Regions, truth: Regions) -> float:
    """The mean over structures that are there, in truth or in the answer; NaN if none is."""
    each = [value for name in truth if not np.isnan(value := dice(found[name], truth[name]))]
    return float(np.mean(each)) if each else float("nan")


def coloured(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Grey or colour (H, W, 1 or 3) as colour."""
    return np.repeat(image, 4 - image.shape[2], axis=2)[..., :3]


def _ratio(masks: Mapping[str, NDArray[np.bool_]]) -> float:
    return vcdr(masks["disc"][0], masks["cup"][0])


def regions(
    answer: Tensor, volume: Volume, structures: Structures, *, multilabel: bool
) -> dict[str, NDArray[np.bool_]]:
    """The mask of each structure (H, W) that an answer (C, size, size) means, on the whole slice."""
    if multilabel:
        return dict(zip(structures, label_masks(volume, answer), strict=True))
    classes = class_mask(volume, answer)
    return {name: np.isin(classes, part) for name, part in structures.items()}
