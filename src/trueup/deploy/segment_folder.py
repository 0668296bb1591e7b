"""Segmentation of a folder: show images to an adapting model, batch by batch, and write its masks.

OUT/.trueup/journal.json lists the finished images, beside the adapter's state. A stopped call resumes from there and
writes the same bytes as without the stop. A later call continues with the adapted model, and does only new images.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
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
from trueup.data.datasets.mask_folders import IMAGES
from trueup.data.loading import normalize_images
from trueup.data.pictures import Range, Reading, Resize
from trueup.data.slices import class_mask, label_masks
from trueup.data.streams import balanced_batches
from trueup.data.volumes import SUFFIXES as VOLUMES
from trueup.data.volumes import Grid
from trueup.deploy.folder_images import JOURNAL, ImageFile, LoadedImage, find_images, read_batches, show_ras
from trueup.deploy.run_log import RunLog, exclusive_access
from trueup.model.calls import as_logits, call_model
from trueup.model.copy_model import copy_model
from trueup.validate import check_int

MOST = 255  # classes or labels of an 8-bit mask
Window = tuple[int, int, int]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class SegmentConfig:
    """A segmenter, its view of images, and its method of adaptation."""

    model: nn.Module
    """Copied, never changed."""
    size: int = 256
    """Side in pixels of what the network sees."""
    normalize: Normalize | None = None
    """"imagenet", "half", or mean and std of values from 0 to 1. None: "imagenet"; windows are seen from 0 to 1."""
    multilabel: bool = False
    """One sigmoid per label, instead of a softmax over classes with the background first."""
    labels: tuple[str, ...] = ()
    """Names of the labels in mask files; 1, 2, … by default."""
    method: str = "tsd"
    hyper: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    field: float | None = None
    """Side in millimetres of the central square of a slice that the network sees; None: all of it."""
    batch: int = 8
    """Slices of a volume, or pictures, per batch; the last batch may be smaller."""
    seed: int = 0
    device: str = "cpu"
    resize: Resize | None = None
    """Way in which pictures, and volumes without a field, become square: "pad" (default), "crop" or "squash"."""
    range: Range | None = None
    """Values of black and white in pictures of more than 8 bits; None uses percentiles for grey ones."""
    grey: bool = False
    """True if the network takes one channel."""
    window: Window | None = None
    """Window of a 3-D network in voxels, in RAS order.

    Files are then volumes with one channel, `batch` counts windows, and `range` (None: percentiles) is that of their
    values. Size, field and resize are not used.
    """
    overlap: float = 0.25
    """Share of a window that overlaps with the next."""

    @property
    def normalization(self) -> Normalize:
        """Normalisation of values from 0 to 1."""
        return check_normalize(self.normalize or ("imagenet" if self.window is None else (0, 1)))

    @property
    def channels(self) -> Channels:
        """Channels of a pixel as the network sees them."""
        return make_channels(self.normalization, self.grey or self.window is not None)

    @property
    def reading(self) -> Reading:
        """Settings for reading picture files."""
        return Reading(self.range, self.resize)

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        Reading(self.range, self.resize)
        check_int("size", self.size, 1)
        check_int("batch", self.batch, 1)
        _ = self.channels  # refuses an invalid normalisation
        self._check_window()
        if self.field is not None and not 0 < self.field < float("inf"):
            raise ValueError(f"field={self.field!r} must be a number of millimetres above 0")
        named = ", ".join(map(repr, self.labels))
        if self.labels and not self.multilabel:
            raise ValueError(f"labels={named} are for multilabel; classes are numbers in one mask")
        if len(set(self.labels)) < len(self.labels) or any(not n or set(n) & set("/\\\0") for n in self.labels):
            raise ValueError(f"labels={named} must be unique, and valid in file names")

    def _check_window(self) -> None:
        if self.window is None:
            return
        if len(self.window) != 3:
            raise ValueError(f"window={self.window!r} must be three numbers of voxels")
        for side in self.window:
            check_int("window", side, 1)
        if not 0 <= self.overlap < 1:
            raise ValueError(f"overlap={self.overlap!r} must be from 0 to less than 1: the share of a window")
        if self.field is not None or self.resize is not None:
            name = "field" if self.field is not None else "resize"
            raise ValueError(f"{name}={getattr(self, name)!r} is for slices; a 3-D network sees all of a volume")

    def settings(self) -> dict[str, Any]:
        """Return everything that masks depend on, as plain JSON values."""
        hyper = make_method(self.method, self.hyper, "segmentation").hyperparameters()
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("model", "hyper")}
        values |= {f"{self.method}.{name}": value for name, value in hyper.items()}
        values["resize"] = None if self.resize == "pad" else self.resize  # the default
        values["normalize"] = self.normalization
        # Later settings are stored only if they differ from the default, so that older folders can be resumed.
        later = {"grey": self.grey, "window": self.window, "overlap": self.window}
        values = {name: value for name, value in values.items() if later.get(name, True)}
        values |= {"model": files.digest(self.model.state_dict())[:16], "device": torch.device(self.device).type}
        settings: dict[str, Any] = json.loads(json.dumps(values, default=lambda _: "a function"))
        return settings

    def endings(self, outputs: int) -> tuple[str, ...]:
        """Return the suffixes of an image's mask names, for a network with so many outputs."""
        if not self.multilabel:
            return ("",)
        if self.labels and len(self.labels) != outputs:
            raise ValueError(f"the model has {outputs} labels, not {len(self.labels)}: {', '.join(self.labels)}")
        return tuple(f"-{label}" for label in self.labels or range(1, outputs + 1))


@dataclass(frozen=True)
class SegmentSummary:
    """Result of a call, with images by their path below the folder."""

    done: tuple[str, ...]
    skipped: tuple[str, ...]
    """Finished by an earlier call, and unchanged since."""
    broken: dict[str, str]
    """Images that cannot be read, with the reason."""
    others: tuple[str, ...]
    """Files that are not images."""
    masks: int
    """Mask files written."""
    updates: int
    """Updates of the model, including earlier calls."""
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """Named pipes, circular links and the like, with their kind."""


def segment_folder(
    config: SegmentConfig,
    images: str | Path,
    out: str | Path,
    *,
    fresh: bool = False,
    keep_every: float = 30.0,
    progress: Progress = lambda done, of: None,
) -> SegmentSummary:
    """Write masks of all images in a folder and below, with the names and voxel grids of the images.

    fresh: forget the work and the adapted state of earlier calls; their masks stay until they are replaced.
    keep_every: seconds between saves of the run log.
    progress: called with the number of images done, and of those to do.
    """
    images, out = Path(images), Path(out)
    adapter = _adapter(config)
    settings = config.settings()
    kinds = IMAGES if config.window is None else VOLUMES
    found, others = find_images(images, out, config.endings(adapter.net.channels), kinds)
    existing = (mask for image in found for mask in image.masks if mask.exists())  # may have been drawn by hand
    if not fresh and not (out / JOURNAL).exists() and (mask := next(existing, None)):
        raise ValueError(f"{mask} already exists: choose another --out, or replace existing masks with --fresh")
    with exclusive_access(out):
        run_log = RunLog(out, settings, fresh=fresh)
        run_log.load(adapter)
        if not run_log.state:
            run_log.save(adapter)  # before the first mask, which marks the masks as ours
        skipped = {image.name for image in found if run_log.has(image)}
        todo = [image for image in found if image.name not in skipped]
        work = _Work(config, adapter, todo, run_log, progress)
        work.run(keep_every)
    return SegmentSummary(
        done=tuple(image.name for image in work.done),
        skipped=tuple(sorted(skipped)),
        broken={**others.broken, **work.broken},
        others=tuple(others.others),
        masks=sum(len(image.masks) for image in work.done),
        updates=adapter.updates,
        left_out=others.skipped,
    )


def _adapter(config: SegmentConfig) -> Adapter:
    """Return a fresh adapter on its device, or refuse what the model or the method cannot do."""
    try:
        model = copy_model(config.model).to(config.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {config.device!r} cannot be used: {str(error).splitlines()[0]}") from error
    example = _example(config).to(config.device)
    with torch.no_grad():
        answer = _try_model(copy_model(model).eval(), example, config)
    shape = tuple(as_logits(answer, None, rows=len(example), min_channels=1 if config.multilabel else 2).shape)
    if len(shape) != example.ndim or shape[1] > MOST:
        seen = "two images" if config.window is None else f"windows {tuple(example.shape)}"
        raise ValueError(f"the model answers {seen} with {shape}: these are not masks of at most {MOST} classes")
    if config.window is not None and shape[2:] != tuple(config.window):
        raise ValueError(
            f"the model answers windows of {config.window} voxels with {shape[2:]}: choose another --window"
        )
    method = make_method(config.method, config.hyper, "segmentation")
    return adapt(model, method, example=example, multilabel=config.multilabel, seed=config.seed)


def _example(config: SegmentConfig) -> Tensor:
    """Return random images or windows, without touching torch's global random state."""
    if config.window is None:
        shape: tuple[int, ...] = (2, config.channels.count, config.size, config.size)
    else:
        _sliding_window()  # refuses if it is not installed
        shape = (min(2, config.batch), 1, *config.window)  # no more than a batch: windows are large
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _sliding_window() -> Any:
    """Return MONAI's sliding window function."""
    try:
        return import_module("monai.inferers").sliding_window_inference
    except ImportError as error:
        raise ImportError("3-D networks on volumes need monai: pip install monai") from error


def _try_model(model: nn.Module, example: Tensor, config: SegmentConfig) -> Any:
    """Return the answer of a model, or refuse it and name the flag that may be missing."""
    try:
        return call_model(model, example)
    except ValueError as error:
        if config.window is not None:
            way = f"a 3-D network sees windows (N, 1, {', '.join(map(str, config.window))}): choose another --window"
            ranks = {weight.ndim for weight in model.parameters()}
            if 4 in ranks and 5 not in ranks:  # 2-D convolutions, and no 3-D ones
                way = f"the network is 2-D, and {way.partition(':')[0]}: leave --volumes out, and it sees slices"
        else:
            way = "leave --grey out if it takes three channels" if config.grey else "--grey if it takes one channel"
            way += ", --volumes if it is 3-D"
        raise ValueError(f"{error}; {way}") from error


@dataclass
class _Work:
    """The images of a call: those to do, done and broken."""

    config: SegmentConfig
    adapter: Adapter
    todo: Sequence[ImageFile]
    run_log: RunLog
    progress: Progress
    done: list[ImageFile] = dataclasses.field(default_factory=list)
    broken: dict[str, str] = dataclasses.field(default_factory=dict)

    def run(self, keep_every: float) -> None:
        """Read the images batch by batch, and write their masks."""
        config = self.config
        segment = self.segment_slices if config.window is None else self.segment_volume

        def read(image: ImageFile) -> tuple[Any, Grid | None]:
            return image.read(config.field, config.reading) if config.window is None else image.read_ras(config.range)

        self.report()
        saved = time.monotonic()
        for group in read_batches(self.todo, read, config.batch, self.broken):
            segment(group)
            self.done.extend(loaded.image for loaded in group)
            self.run_log.done |= {loaded.image.name: loaded.stamp for loaded in group}
            group.clear()  # frees the images before the next are read
            if time.monotonic() - saved >= keep_every:
                self.run_log.save(self.adapter)
                saved = time.monotonic()
            self.report()
        if self.done:
            self.run_log.save(self.adapter)

    def report(self) -> None:
        """Call the user's progress function."""
        self.progress(len(self.done) + len(self.broken), len(self.todo))

    def segment_volume(self, group: Sequence[LoadedImage]) -> None:
        """Show all windows of the only volume of a group, batch by batch, blend the answers, and write its masks.

        Windows beyond the edge of a small volume see zeros.
        """
        config, (volume,) = self.config, group
        assert config.window is not None
        assert volume.grid is not None

        def predict(x: Tensor) -> Tensor:
            logits = self.adapter(x)
            self.report()
            return logits

        mean, std = np.float32(config.channels.mean[0]), np.float32(config.channels.std[0])
        x = torch.from_numpy((volume.content - mean) / std)[None, None]
        how: dict[str, Any] = {"overlap": config.overlap, "sw_device": config.device, "device": "cpu"}
        try:
            (logits,) = _sliding_window()(x, config.window, config.batch, predict, **how)
        except ValueError as error:
            raise ValueError(f"{volume.image.name}: {error}") from error
        masks = logits > 0 if config.multilabel else logits.argmax(dim=0, keepdim=True)
        volume.write(show_ras(mask, volume.grid) for mask in masks.to(torch.uint8).numpy())

    def segment_slices(self, group: Sequence[LoadedImage]) -> None:
        """Show all slices of these images, then write their masks."""
        config = self.config
        masks = [np.zeros((len(c.image.masks), *c.content.image.shape[:3]), dtype=np.uint8) for c in group]
        slices = [(i, z) for i, loaded in enumerate(group) for z in range(len(loaded.content.image))]
        for chosen in balanced_batches(np.arange(len(slices)), config.batch):
            part = [slices[i] for i in chosen]
            x = normalize_images([group[i].content.network_view(z, config.size) for i, z in part], config.channels)
            try:
                logits = self.adapter(x.to(config.device)).cpu()
            except ValueError as error:
                names = dict.fromkeys(group[i].image.name for i, _ in part)
                raise ValueError(f"{', '.join(names)}: {error}") from error
            for (i, z), answer in zip(part, logits, strict=True):
                mask_of = label_masks if config.multilabel else class_mask
                masks[i][:, z] = mask_of(group[i].content, answer)
            self.report()
        for loaded, mask in zip(group, masks, strict=True):
            loaded.write(mask)
