"""Disturbances: unscored rows that are put among the genuine images of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.core.adapter import Adapter
from trueup.core.registry import make_method
from trueup.data.loading import Loader
from trueup.model.calls import as_logits, call_model
from trueup.model.copy_model import copy_model
from trueup.norm import make_policy

Indices = NDArray[np.int64]
ONCE = ("nan", "huge")  # one row in the whole stream
SHARED = ("ood", "replay", "crafted")  # a share of every batch
HUGE = 1e6  # times a genuine image
KEPT = 2**30  # bytes of intruders that may be kept for other methods
STEPS = 20  # of an attack
CONFIDENCE = 0.01  # weight of the attack's own confidence beside the harm to other rows
REACH = 0.5  # how far an attack may move a pixel, as a share of the range of values


@dataclass(frozen=True)
class Disturbance:
    """A kind of intruder, and its share of each batch."""

    kind: str
    share: float = 0.0

    def genuine(self, batch: int) -> int:
        """Return how many rows of a full batch are genuine images."""
        return max(1, round(batch * (1 - self.share)))

    def intruders(self, genuine: int, batch: int) -> int:
        """Return how many intruders join this many genuine images; proportionally fewer in a smaller batch."""
        full = self.genuine(batch)
        return round(genuine * (batch - full) / full)


def parse_disturbance(text: str) -> Disturbance:
    """Parse "nan", "huge", "ood:0.1", "replay:0.1" or "crafted:0.1"."""
    kind, colon, share = text.partition(":")
    if kind in ONCE and not colon:
        return Disturbance(kind)
    try:
        part = float(share)
    except ValueError:
        part = 0.0
    if kind not in SHARED or not 0 < part < 1:
        raise ValueError(
            f"{text!r} must be {' or '.join(ONCE)}, or one of {', '.join(SHARED)} with a share of the batch between "
            "0 and 1, such as ood:0.1"
        )
    return Disturbance(kind, part)


def normalize_disturbance(text: str) -> str:
    """Return a disturbance in the form that records use; an empty string means none."""
    parsed = parse_disturbance(text) if text else Disturbance("")
    return f"{parsed.kind}:{parsed.share:g}" if parsed.share else parsed.kind


@dataclass
class Intruders:
    """The batches of a stream with intruders, whose index is -1; determined by the seed."""

    disturbance: Disturbance
    model: nn.Module  # the frozen source model, which an attacker knows
    loader: Loader
    stream: list[Indices]
    batch: int  # rows per batch, intruders included
    seed: int = 0
    device: str = "cpu"
    kept: dict[int, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of intruders in the whole stream."""
        if self.disturbance.kind in ONCE:
            return 1
        return sum(self.disturbance.intruders(len(batch), self.batch) for batch in self.stream)

    def batches(self) -> Iterator[tuple[Tensor, Indices]]:
        """Yield the loader's batches with intruders; genuine images and their order stay the same."""
        keep = 4 * 3 * self.loader.size**2 * len(self) <= KEPT
        for number, (x, indices) in enumerate(self.loader.batches(self.stream)):
            rows = self.kept.get(number)
            if rows is None:
                rows = self._rows(number, x, indices)
                if keep:
                    self.kept[number] = rows
            yield mix_rows(x, indices, rows, self._random(number, 1))

    def _random(self, number: int, use: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(number, use, 0)))

    def _rows(self, number: int, x: Tensor, indices: Indices) -> Tensor:
        """Return the intruders of a batch."""
        kind, rng = self.disturbance.kind, self._random(number, 0)
        if kind in ONCE:
            return SPOILT[kind](x, rng) if number == len(self.stream) // 3 else x[:0]
        count = self.disturbance.intruders(len(x), self.batch)
        if not count:
            return x[:0]
        if kind == "ood":
            return make_ood_images(x, count, rng, first=number)
        if kind == "replay":
            images = [self.loader.read(int(i)) for i in rng.choice(self._missed, count)]
            return self.loader.tensor([image for image in images if image is not None])
        return craft_attack(self._victim, x.to(self.device), count, rng).cpu()

    @cached_property
    def _victim(self) -> nn.Module:
        return copy_model(self.model).eval().requires_grad_(False).to(self.device)

    @cached_property
    def _missed(self) -> Indices:
        """Return the images that the source model gets wrong; if there are none, the least certain one."""
        source = Adapter(self.model, make_method("source", {})).to(self.device)
        labels, where, doubt, wrong = self.loader.place.labels, [], [], []
        unique = np.unique(np.concatenate(self.stream))
        for x, indices in self.loader.batches(np.array_split(unique, -(-len(unique) // 64))):
            log_probs = F.log_softmax(source(x.to(self.device)).cpu().double(), dim=1).numpy()
            where.append(indices)
            doubt.append(-log_probs[np.arange(len(indices)), labels[indices]])
            wrong.append(log_probs.argmax(axis=1) != labels[indices])
        at, missed = np.concatenate(where), np.concatenate(wrong)
        return at[missed] if missed.any() else at[[np.concatenate(doubt).argmax()]]


def mix_rows(x: Tensor, indices: Indices, rows: Tensor, rng: np.random.Generator) -> tuple[Tensor, Indices]:
    """Insert rows into a batch at random positions; the others keep their order and memory layout."""
    if not len(rows):
        return x, indices
    total = len(x) + len(rows)
    here = np.zeros(total, dtype=np.bool_)
    here[rng.choice(total, len(rows), replace=False)] = True
    both = x.new_empty((total, *x.shape[1:])).contiguous(memory_format=torch.channels_last)
    both[torch.from_numpy(~here)], both[torch.from_numpy(here)] = x, rows.to(x)
    numbers = np.full(total, -1, dtype=np.int64)
    numbers[~here] = indices
    return both, numbers


def _with_nan(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Return a genuine image with one NaN pixel."""
    row = x[[rng.integers(len(x))]].clone()
    row[0, rng.integers(x.shape[1]), rng.integers(x.shape[2]), rng.integers(x.shape[3])] = float("nan")
    return row


SPOILT: dict[str, Callable[[Tensor, np.random.Generator], Tensor]] = {
    "nan": _with_nan,
    "huge": lambda x, rng: HUGE * x[[rng.integers(len(x))]],
}


# Images of no class


def make_ood_images(x: Tensor, count: int, rng: np.random.Generator, first: int = 0) -> Tensor:
    """Return noise, smooth textures and images with shuffled patches in turn, within the batch's range of values."""
    makers = (_noise, _texture, _puzzle)
    rows = torch.stack([makers[(first + i) % 3](x, rng) for i in range(count)])
    return rows.clamp(x.min(), x.max())


def _coloured(x: Tensor, pattern: Tensor) -> Tensor:
    """Give a standardised pattern (C, H, W) the channel means and deviations of a batch."""
    deviation, mean = torch.std_mean(x, dim=(0, 2, 3), correction=0)
    return pattern * deviation[:, None, None] + mean[:, None, None]


def _noise(x: Tensor, rng: np.random.Generator) -> Tensor:
    return _coloured(x, torch.from_numpy(rng.standard_normal(x.shape[1:], dtype=np.float32)))


def _texture(x: Tensor, rng: np.random.Generator) -> Tensor:
    coarse = torch.from_numpy(rng.standard_normal((1, x.shape[1], 5, 5), dtype=np.float32))
    pattern = F.interpolate(coarse, size=x.shape[2:], mode="bicubic", align_corners=True)[0]
    deviation, mean = torch.std_mean(pattern, dim=(1, 2), correction=0, keepdim=True)
    return _coloured(x, (pattern - mean) / deviation)


def _puzzle(x: Tensor, rng: np.random.Generator) -> Tensor:
    image = x[rng.integers(len(x))]
    high, wide = (side // 4 for side in image.shape[1:])
    places = [(row * high, column * wide) for row in range(4) for column in range(4)]
    puzzle = image.clone()
    for (row, column), other in zip(places, rng.permutation(16).tolist(), strict=True):
        down, across = places[other]
        puzzle[:, row : row + high, column : column + wide] = image[:, down : down + high, across : across + wide]
    return puzzle


# Attacks


def craft_attack(model: nn.Module, x: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """Craft harmful images: a grey-box attack that knows the frozen source model and the batch that it joins.

    The images start as copies of genuine rows and take 20 signed gradient steps of 2.5 / 20 of their reach, half of the
    batch's range of values. Through the shared BatchNorm statistics they raise the cross-entropy of the genuine rows
    with respect to the source's predictions; they also become confident in a class that the source did not predict.
    Without BatchNorm layers they do only the latter.
    """
    low, high = x.min(), x.max()
    reach = REACH * (high - low)
    start = x[torch.from_numpy(rng.integers(len(x), size=count)).to(x.device)]
    with torch.no_grad():
        clean, own = _logits(model, x), _logits(model, start).argmax(dim=1)
    turn = torch.from_numpy(rng.integers(1, max(2, clean.shape[1]), size=count)).to(x.device)
    wrong = (own + turn) % clean.shape[1]
    shared = any(isinstance(m, _BatchNorm) and m.running_mean is not None for m in model.modules())
    mates = x if shared else x[:0]
    rows = start.clone()
    for _ in range(STEPS):
        rows.requires_grad_(True)
        with torch.enable_grad(), make_policy("batch").active(model):
            answers = _logits(model, torch.cat([mates, rows]))
            gain = -CONFIDENCE * F.cross_entropy(answers[len(mates) :], wrong)
            if len(mates):
                gain = gain + F.cross_entropy(answers[: len(mates)], clean.argmax(dim=1))
            (slope,) = torch.autograd.grad(gain, rows)
        moved = rows.detach() + 2.5 * reach / STEPS * slope.sign()
        rows = moved.clamp(start - reach, start + reach).clamp(low, high)
    return rows


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    return as_logits(call_model(model, x), None, rows=len(x))
