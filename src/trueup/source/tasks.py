"""Tasks of source training: the held-out images, loss and validation score of classification and segmentation."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trueup.data.datasets import Dataset
from trueup.data.domains import Domain, Image
from trueup.data.slices import SliceDomain
from trueup.data.transforms import TRANSFORMS, augment_with_mask
from trueup.source.recipe import Training


def split_holdout(domain: Domain, holdout: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return indices to train on and indices held out: a share of every class, by the domain's name and the seed.

    With masks it is a share of the patients, with all slices of each.
    """
    rng = np.random.default_rng([seed, zlib.crc32(domain.name.encode())])
    if isinstance(domain, SliceDomain):
        patients = rng.permutation(np.unique(domain.labels))
        # At least one patient trains; at least one is held out, unless holdout is 0.
        cut = min(max(round(holdout * len(patients)), int(holdout > 0)), len(patients) - 1)
        away = np.isin(domain.labels, patients[:cut])
        return np.flatnonzero(~away), np.flatnonzero(away)
    train, held = [], []
    for label in np.unique(domain.labels):
        members = rng.permutation(np.flatnonzero(domain.labels == label))
        # At least one image of each class trains; rounding is to the nearest.
        cut = min(round(holdout * len(members)), len(members) - 1)
        held.append(members[:cut])
        train.append(members[cut:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(held))


def task_of(dataset: Dataset, training: Training) -> Task:
    """Return the task of a dataset."""
    if len(dataset.classes) < 2:
        raise ValueError(f"a network needs at least two classes, but {dataset.name} has one")
    if dataset.task == "segmentation":
        return Segment(training, dataset.structures)
    return Classify(training)


class Classify:
    """One class per image: cross-entropy and accuracy."""

    score = "accuracy"

    def __init__(self, training: Training) -> None:
        if training.augment not in TRANSFORMS:
            raise ValueError(f"augment={training.augment!r} is for masks; use {', '.join(TRANSFORMS)}")
        if training.multilabel:
            raise ValueError("multilabel is for masks; this dataset has one class per image")
        self.augment, self.size = TRANSFORMS[training.augment], training.size

    def read(self, domain: Domain, i: int, rng: np.random.Generator) -> tuple[Image, Any]:
        """Return image i, augmented, and its class."""
        return self.augment(domain.image(i), self.size, rng), int(domain.labels[i])

    def answers(self, domain: Domain, indices: NDArray[np.int64]) -> Tensor:
        """Return the classes of images."""
        return torch.from_numpy(domain.labels[indices])

    def tensor(self, answers: Sequence[Any]) -> Tensor:
        """Return classes as a batch."""
        return torch.tensor(answers)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy."""
        if logits.ndim != 2:
            raise ValueError(f"the network returns {tuple(logits.shape)}; one class per image needs a classifier")
        return F.cross_entropy(logits, y)

    def count(self, logits: Tensor, y: Tensor) -> NDArray[np.float64]:
        """Return the number of correct predictions and of images, which add up over batches."""
        return np.array([float((logits.argmax(dim=1) == y).sum()), float(len(y))])

    def final_score(self, counts: NDArray[np.float64]) -> float:
        """Return the accuracy from the summed counts."""
        return float(counts[0] / counts[1])


class Segment:
    """A mask per image: cross-entropy plus soft Dice, so that small structures count; the score is Dice over pixels."""

    score = "dice"

    def __init__(self, training: Training, structures: Mapping[str, tuple[int, ...]]) -> None:
        if training.augment not in ("none", "affine"):
            raise ValueError(f"augment={training.augment!r} does not transform masks; use affine or none")
        self.augment, self.size, self.multilabel = training.augment, training.size, training.multilabel
        self.structures = structures

    def read(self, domain: Domain, i: int, rng: np.random.Generator) -> tuple[Image, Any]:
        """Return image i and its mask, augmented together."""
        assert isinstance(domain, SliceDomain)
        image, mask = domain.image(i, self.size), domain.mask(i, self.size)
        return augment_with_mask(image, mask, rng) if self.augment == "affine" else (image, mask)

    def answers(self, domain: Domain, indices: NDArray[np.int64]) -> Tensor:
        """Return the masks of images."""
        assert isinstance(domain, SliceDomain)
        return self.tensor([domain.mask(i, self.size) for i in indices.tolist()])

    def tensor(self, answers: Sequence[Any]) -> Tensor:
        """Return masks as a batch of class numbers."""
        return torch.from_numpy(np.stack(answers)).long()

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return cross-entropy of classes, or of each label, plus one minus their mean soft Dice."""
        if logits.ndim != 4 or logits.shape[2:] != y.shape[1:]:
            output, masks = tuple(logits.shape), tuple(y.shape)
            raise ValueError(f"the network returns {output}, but masks are {masks}; a mask needs a segmenter")
        if self.multilabel:
            truth = self.regions(y).float()
            probs, loss = logits.sigmoid(), F.binary_cross_entropy_with_logits(logits, truth)
        else:
            truth = F.one_hot(y, logits.shape[1]).movedim(-1, 1).float()
            probs, loss = F.softmax(logits, dim=1), F.cross_entropy(logits, y)
        both = (probs * truth).transpose(0, 1).flatten(1).sum(dim=1)
        sizes = (probs + truth).transpose(0, 1).flatten(1).sum(dim=1)
        return loss + 1 - ((2 * both + 1) / (sizes + 1)).mean()

    def regions(self, y: Tensor) -> Tensor:
        """Return the mask of each structure (N, S, H, W)."""
        return torch.stack([torch.isin(y, torch.tensor(k, device=y.device)) for k in self.structures.values()], dim=1)

    def count(self, logits: Tensor, y: Tensor) -> NDArray[np.float64]:
        """Return, for each structure, the size of the intersection and the sum of both sizes."""
        found = logits > 0 if self.multilabel else self.regions(logits.argmax(dim=1))
        truth = self.regions(y)
        both, sizes = (found & truth).sum(dim=(0, 2, 3)), found.sum(dim=(0, 2, 3)) + truth.sum(dim=(0, 2, 3))
        return torch.stack((both, sizes)).double().cpu().numpy()

    def final_score(self, counts: NDArray[np.float64]) -> float:
        """Return the mean Dice of the structures that occur, from the summed counts."""
        occur = counts[1] > 0
        return float((2 * counts[0][occur] / counts[1][occur]).mean()) if occur.any() else 0.0


Task = Classify | Segment
