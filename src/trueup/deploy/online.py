"""The flow: show images to a segmenter that adapts, batch by batch, and write what it says.

What was done is in OUT/.trueup/journal.json, beside the adapter's state at that moment. A call that was stopped,
wherever it was, goes on from there and writes what it would have written, byte for byte. A later call goes on with what
the model has learnt, and looks only at images that are new.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trueup.core import files
from trueup.core.adapt import adapt
from trueup.core.adapter import Adapter
from trueup.core.copying import copy_model
from trueup.core.heads import as_logits, run
from trueup.core.method import one_of, whole
from trueup.core.registry import make_method
from trueup.data.loading import NORMALIZE, Loader, Place
from trueup.data.slices import classes_on, labels_on
from trueup.data.streams import even
from trueup.deploy.images import JOURNAL, Case, Image, find, groups
from trueup.deploy.journal import Journal, alone

MOST = 255  # classes or labels
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Setup:
    """A segmenter, what it sees of an image, and how it adapts."""

    model: nn.Module
    """It is copied, not touched."""
    size: int = 256
    """Side in pixels of what the network sees."""
    normalize: str = "imagenet"
    """"imagenet" or "half"."""
    multilabel: bool = False
    """One sigmoid per label, instead of one softmax of classes, the first of which is the background."""
    labels: tuple[str, ...] = ()
    """What the labels are called in the names of their masks; 1, 2 and so on if left out."""
    method: str = "tsd"
    hyper: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    field: float | None = None
    """Millimetres of a volume's slices that the network sees, a square in the middle; all of them if None."""
    batch: int = 8
    """Slices of one volume, or pictures, that are shown together; the last may be fewer."""
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        whole("size", self.size, 1)
        whole("batch", self.batch, 1)
        one_of("normalize", self.normalize, tuple(NORMALIZE))
        if self.field is not None and not 0 < self.field < float("inf"):
            raise ValueError(f"field={self.field!r} must be a number of millimetres above 0")
        named = ", ".join(map(repr, self.labels))
        if self.labels and not self.multilabel:
            raise ValueError(f"labels={named} are for multilabel; classes are numbers in one mask")
        if len(set(self.labels)) < len(self.labels) or any(not n or set(n) & set("/\\\0") for n in self.labels):
            raise ValueError(f"labels={named} must differ from each other, and be fit for names of files")

    def settings(self) -> dict[str, Any]:
        """All that masks depend on, as JSON gives it back."""
        hyper = make_method(self.method, self.hyper, "segmentation").hyperparameters()
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("model", "hyper")}
        values |= {f"{self.method}.{name}": value for name, value in hyper.items()}
        values |= {"model": files.digest(self.model.state_dict())[:16], "device": torch.device(self.device).type}
        settings: dict[str, Any] = json.loads(json.dumps(values, default=lambda _: "a function"))
        return settings

    def endings(self, outputs: int) -> tuple[str, ...]:
        """What the files of an image's masks have behind its name, for a network with so many outputs."""
        if not self.multilabel:
            return ("",)
        if self.labels and len(self.labels) != outputs:
            raise ValueError(f"the model has {outputs} labels, not {len(self.labels)}: {', '.join(self.labels)}")
        return tuple(f"-{label}" for label in self.labels or range(1, outputs + 1))


@dataclass(frozen=True)
class Summary:
    """What came of a call. Images are called by their path below the folder."""

    done: tuple[str, ...]
    skipped: tuple[str, ...]
    """Done by an earlier call, and unchanged since."""
    broken: dict[str, str]
    """Images that cannot be read, and why."""
    others: tuple[str, ...]
    """Files that are no images."""
    masks: int
    """Files that were written."""
    updates: int
    """Of the model since it was the source model, in earlier calls too."""


def segment(
    setup: Setup,
    images: str | Path,
    out: str | Path,
    *,
    fresh: bool = False,
    keep_every: float = 30.0,
    progress: Progress = lambda done, of: None,
) -> Summary:
    """Write masks of all images in a folder and below; they are named, and lie on the voxels, as the images.

    fresh: forget what earlier calls have done and learnt; their masks stay until they are replaced.
    keep_every: seconds after which what was done is kept for a call that goes on with this one.
    progress: called with the number of images done, and of those to do.
    """
    images, out = Path(images), Path(out)
    adapter = _adapter(setup)
    settings = setup.settings()
    found, others = find(images, out, setup.endings(adapter.net.channels))
    if not fresh and not (out / JOURNAL).exists():
        _refuse_strangers(found)
    with alone(out):
        journal = Journal(out, settings, fresh=fresh)
        journal.load(adapter)
        if not journal.state:
            journal.save(adapter)  # before the first mask, so that masks are known to be ours
        skipped = {image.name for image in found if journal.has(image)}
        todo = [image for image in found if image.name not in skipped]
        done, broken = _work(setup, adapter, todo, journal, keep_every, progress)
    masks = sum(len(image.masks) for image in done)
    names = tuple(image.name for image in done)
    return Summary(names, tuple(sorted(skipped)), broken, tuple(others), masks, adapter.updates)


def _refuse_strangers(found: Sequence[Image]) -> None:
    """Masks that somebody may have drawn by hand are not written over."""
    if there := next((mask for image in found for mask in image.masks if mask.exists()), None):
        raise ValueError(f"{there} is there already: choose another --out, or replace what is in the way with --fresh")


def _adapter(setup: Setup) -> Adapter:
    """A fresh adapter on its device. What the model or the method cannot do is said before anything is written."""
    try:
        model = copy_model(setup.model).to(setup.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {setup.device!r} cannot be used: {str(error).splitlines()[0]}") from error
    example = torch.randn(2, 3, setup.size, setup.size, generator=torch.Generator().manual_seed(0)).to(setup.device)
    with torch.no_grad():
        answer = run(copy_model(model).eval(), example)
    shape = tuple(as_logits(answer, None, rows=2, least=1 if setup.multilabel else 2).shape)
    if len(shape) != 4 or shape[1] > MOST:
        raise ValueError(f"the model answers two images with {shape}: these are no masks of at most {MOST} classes")
    method = make_method(setup.method, setup.hyper, "segmentation")
    return adapt(model, method, example=example, multilabel=setup.multilabel, seed=setup.seed)


def _work(
    setup: Setup, adapter: Adapter, todo: Sequence[Image], journal: Journal, keep_every: float, progress: Progress
) -> tuple[list[Image], dict[str, str]]:
    """Write the masks of these images: those that were done, and those that are broken."""
    done: list[Image] = []
    broken: dict[str, str] = {}

    def tell() -> None:
        progress(len(done) + len(broken), len(todo))

    tell()
    kept = time.monotonic()
    for group in groups(todo, field=setup.field, batch=setup.batch, broken=broken):
        _answer(setup, adapter, group, tell)
        done.extend(case.image for case in group)
        journal.done |= {case.image.name: case.stamp for case in group}
        group.clear()  # before the next is read
        if time.monotonic() - kept >= keep_every:
            journal.save(adapter)
            kept = time.monotonic()
        tell()
    if done:
        journal.save(adapter)
    return done, broken


def _answer(setup: Setup, adapter: Adapter, group: Sequence[Case], tell: Callable[[], None]) -> None:
    """Show all slices of these images, then write their masks."""
    loader = Loader(Place(()), setup.size, setup.normalize)
    masks = [np.zeros((len(c.image.masks), *c.volume.image.shape[:3]), dtype=np.uint8) for c in group]
    slices = [(i, z) for i, case in enumerate(group) for z in range(len(case.volume.image))]
    for chosen in even(np.arange(len(slices)), setup.batch):
        part = [slices[i] for i in chosen]
        x = loader.tensor([group[i].volume.show(z, setup.size) for i, z in part])
        try:
            logits = adapter(x.to(setup.device)).cpu()
        except ValueError as error:
            raise ValueError(f"{', '.join(dict.fromkeys(group[i].image.name for i, _ in part))}: {error}") from error
        for (i, z), answer in zip(part, logits, strict=True):
            said = labels_on if setup.multilabel else classes_on
            masks[i][:, z] = said(group[i].volume, answer)
        tell()
    for case, each in zip(group, masks, strict=True):
        case.write(each)
