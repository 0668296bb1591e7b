"""The flow: show images to a segmenter that adapts, batch by batch, and write what it says.

What was done is in OUT/.trueup/journal.json, beside the adapter's state at that moment. A call that was stopped,
wherever it was, goes on from there and writes what it would have written, byte for byte. A later call goes on with what
the model has learnt, and looks only at images that are new.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trueup.core import files
from trueup.core.adapt import adapt
from trueup.core.adapter import Adapter
from trueup.core.registry import make_method
from trueup.data.channels import Channels, Normalize, check_normalize, make_channels
from trueup.data.datasets.masks import IMAGES
from trueup.data.loading import ConcatDomains, Loader
from trueup.data.pictures import Range, Reading, Resize
from trueup.data.slices import classes_on, labels_on
from trueup.data.streams import balanced_batches
from trueup.data.volumes import SUFFIXES as VOLUMES
from trueup.deploy.folder_images import JOURNAL, Case, Image, find, groups
from trueup.deploy.run_log import RunLog, alone
from trueup.deploy.windows import Solid, Window, slide, sliding_window, solids
from trueup.model.copying import copy_model
from trueup.model.heads import as_logits, call_model
from trueup.validate import check_int

MOST = 255  # classes or labels
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Setup:
    """A segmenter, what it sees of an image, and how it adapts."""

    model: nn.Module
    """It is copied, not touched."""
    size: int = 256
    """Side in pixels of what the network sees."""
    normalize: Normalize | None = None
    """"imagenet", "half", or mean and std of values from 0 to 1. None: "imagenet"; windows are seen from 0 to 1."""
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
    resize: Resize | None = None
    """How pictures, and volumes without a field, become square: "pad" (if None), "crop" or "squash"."""
    range: Range | None = None
    """The values that are black and white in pictures of more than 8 bits; None windows grey ones by percentiles."""
    grey: bool = False
    """True if the network takes one channel."""
    window: Window | None = None
    """Of a 3-D network, what it sees at a time of a volume: voxels towards the patient's right, front and head.

    Then files are volumes, `batch` counts windows, `range` holds for their values (None: percentiles), and there is
    one channel. Size, field and resize mean nothing.
    """
    overlap: float = 0.25
    """The part of a window that the next one sees again."""

    @property
    def normalization(self) -> Normalize:
        """How values from 0 to 1 are normalised."""
        return check_normalize(self.normalize or ("imagenet" if self.window is None else (0, 1)))

    @property
    def channels(self) -> Channels:
        """The channels of a pixel as the network sees them."""
        return make_channels(self.normalization, self.grey or self.window is not None)

    @property
    def reading(self) -> Reading:
        """How picture files are read."""
        return Reading(self.range, self.resize)

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        Reading(self.range, self.resize)
        check_int("size", self.size, 1)
        check_int("batch", self.batch, 1)
        _ = self.channels  # refuses a normalisation that means nothing
        self._check_window()
        if self.field is not None and not 0 < self.field < float("inf"):
            raise ValueError(f"field={self.field!r} must be a number of millimetres above 0")
        named = ", ".join(map(repr, self.labels))
        if self.labels and not self.multilabel:
            raise ValueError(f"labels={named} are for multilabel; classes are numbers in one mask")
        if len(set(self.labels)) < len(self.labels) or any(not n or set(n) & set("/\\\0") for n in self.labels):
            raise ValueError(f"labels={named} must differ from each other, and be fit for names of files")

    def _check_window(self) -> None:
        if self.window is None:
            return
        if len(self.window) != 3:
            raise ValueError(f"window={self.window!r} must be three numbers of voxels")
        for side in self.window:
            check_int("window", side, 1)
        if not 0 <= self.overlap < 1:
            raise ValueError(f"overlap={self.overlap!r} must be a part of a window: from 0 to less than 1")
        if self.field is not None or self.resize is not None:
            name = "field" if self.field is not None else "resize"
            raise ValueError(f"{name}={getattr(self, name)!r} is for slices; a 3-D network sees all of a volume")

    def settings(self) -> dict[str, Any]:
        """All that masks depend on, as JSON gives it back."""
        hyper = make_method(self.method, self.hyper, "segmentation").hyperparameters()
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("model", "hyper")}
        values |= {f"{self.method}.{name}": value for name, value in hyper.items()}
        values["resize"] = None if self.resize == "pad" else self.resize  # which it is if nothing is said
        values["normalize"] = self.normalization
        # What came later is said only where it is not as it always was, so that work on older folders goes on.
        later = {"grey": self.grey, "window": self.window, "overlap": self.window}
        values = {name: value for name, value in values.items() if later.get(name, True)}
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
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """Named pipes, links in a circle and the like, and what each is."""


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
    kinds = IMAGES if setup.window is None else VOLUMES
    found, rest = find(images, out, setup.endings(adapter.net.channels), kinds)
    if not fresh and not (out / JOURNAL).exists():
        _refuse_strangers(found)
    with alone(out):
        journal = RunLog(out, settings, fresh=fresh)
        journal.load(adapter)
        if not journal.state:
            journal.save(adapter)  # before the first mask, so that masks are known to be ours
        skipped = {image.name for image in found if journal.has(image)}
        todo = [image for image in found if image.name not in skipped]
        done, broken = _work(setup, adapter, todo, journal, keep_every, progress)
    masks = sum(len(image.masks) for image in done)
    names = tuple(image.name for image in done)
    broken = {**rest.broken, **broken}
    before, others = tuple(sorted(skipped)), tuple(rest.others)
    return Summary(names, before, broken, others, masks, adapter.updates, rest.skipped)


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
    example = _example(setup).to(setup.device)
    with torch.no_grad():
        answer = _tried(copy_model(model).eval(), example, setup)
    shape = tuple(as_logits(answer, None, rows=len(example), least=1 if setup.multilabel else 2).shape)
    if len(shape) != example.ndim or shape[1] > MOST:
        seen = "two images" if setup.window is None else f"windows {tuple(example.shape)}"
        raise ValueError(f"the model answers {seen} with {shape}: these are no masks of at most {MOST} classes")
    if setup.window is not None and shape[2:] != tuple(setup.window):
        raise ValueError(
            f"the model answers windows of {setup.window} voxels with {shape[2:]}: choose another --window"
        )
    method = make_method(setup.method, setup.hyper, "segmentation")
    return adapt(model, method, example=example, multilabel=setup.multilabel, seed=setup.seed)


def _example(setup: Setup) -> Tensor:
    """Images, or windows, that leave torch's random state alone."""
    if setup.window is None:
        shape: tuple[int, ...] = (2, setup.channels.count, setup.size, setup.size)
    else:
        sliding_window()  # refuses where it is not installed
        shape = (min(2, setup.batch), 1, *setup.window)  # no more than will be shown at a time: windows are large
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _tried(model: nn.Module, example: Tensor, setup: Setup) -> Any:
    """The answer of a model, or why it has none, with the flag that may be missing."""
    try:
        return call_model(model, example)
    except ValueError as error:
        if setup.window is not None:
            way = f"a 3-D network sees windows (N, 1, {', '.join(map(str, setup.window))}): choose another --window"
            if _is_flat(model):
                way = f"the network is 2-D, and {way.partition(':')[0]}: leave --volumes out, and it sees slices"
        else:
            way = "leave --grey out if it takes three channels" if setup.grey else "--grey if it takes one channel"
            way += ", --volumes if it is 3-D"
        raise ValueError(f"{error}; {way}") from error


def _is_flat(model: nn.Module) -> bool:
    """Return True if a network has the weights of 2-D convolutions, and none of 3-D ones."""
    ranks = {weight.ndim for weight in model.parameters()}
    return 4 in ranks and 5 not in ranks


def _work(
    setup: Setup, adapter: Adapter, todo: Sequence[Image], journal: RunLog, keep_every: float, progress: Progress
) -> tuple[list[Image], dict[str, str]]:
    """Write the masks of these images: those that were done, and those that are broken."""
    done: list[Image] = []
    broken: dict[str, str] = {}

    def tell() -> None:
        progress(len(done) + len(broken), len(todo))

    tell()
    kept = time.monotonic()
    for group in _shown(setup, adapter, todo, broken, tell):
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


def _shown(
    setup: Setup, adapter: Adapter, todo: Sequence[Image], broken: dict[str, str], tell: Callable[[], None]
) -> Iterator[list[Case] | list[Solid]]:
    """Read what is shown together, show it and write its masks."""
    if setup.window is None:
        for group in groups(todo, field=setup.field, batch=setup.batch, broken=broken, reading=setup.reading):
            _answer(setup, adapter, group, tell)
            yield group
        return
    for solid in solids(todo, setup.range, broken):
        _slide(setup, adapter, solid[0], tell)
        yield solid


def _slide(setup: Setup, adapter: Adapter, solid: Solid, tell: Callable[[], None]) -> None:
    """Show all windows of a volume, batch by batch, then write its masks."""

    def predict(x: Tensor) -> Tensor:
        logits = adapter(x)
        tell()
        return logits

    assert setup.window is not None
    how: dict[str, Any] = {"overlap": setup.overlap, "batch": setup.batch, "device": setup.device}
    try:
        logits = slide(solid, predict, setup.channels, setup.window, **how)
    except ValueError as error:
        raise ValueError(f"{solid.image.name}: {error}") from error
    masks = logits > 0 if setup.multilabel else logits.argmax(dim=0, keepdim=True)
    solid.write(masks.to(torch.uint8).numpy())


def _answer(setup: Setup, adapter: Adapter, group: Sequence[Case], tell: Callable[[], None]) -> None:
    """Show all slices of these images, then write their masks."""
    loader = Loader(ConcatDomains(()), setup.size, setup.channels)
    masks = [np.zeros((len(c.image.masks), *c.volume.image.shape[:3]), dtype=np.uint8) for c in group]
    slices = [(i, z) for i, case in enumerate(group) for z in range(len(case.volume.image))]
    for chosen in balanced_batches(np.arange(len(slices)), setup.batch):
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
