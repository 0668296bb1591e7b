"""Saving and loading the state of an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trueup.core import files
from trueup.core.building import Attempt, build, restored_on_error
from trueup.core.identity import brief, identity, refuse_foreign
from trueup.core.isolation import all_or_nothing, networks
from trueup.core.state import (
    AdapterState,
    Progress,
    check_fit,
    complete,
    named_tensors,
    split_by_part,
    with_tensors,
)
from trueup.model.runner import RunSettings
from trueup.validate import check_int
from trueup.version import __version__

if TYPE_CHECKING:
    from trueup.core.lifecycle import AdapterBase

Parts = dict[str, dict[str, Tensor]]
MEASURED = {"precision": "float32", "channels_last": False}  # settings that may be measured, and their defaults
OLDER: dict[str, Any] = {
    "multilabel": False,
    "guard": None,
    "task": "classification",
    "pixels": None,
    "engine": MEASURED,
    "shrunk": 0,
    "images": 0,
}
"""Entries of a header that older files do not have."""
PARTS = ("net", "state", "policy", "fresh", "random", "optimizer", "watch", "kept0", "kept1")


def save(adapter: AdapterBase, path: str | Path) -> None:
    """Write the state to a file, which only its owner may read if it holds images or features."""
    info = adapter.method.info
    if info.images:
        adapter.warn_once("a state of %s holds images of the stream: protect it as you protect them", info.name)
    files.write(path, *to_file(adapter), "adapter", info.private)


def load(adapter: AdapterBase, path: str | Path) -> None:
    """Continue from a file; a foreign or damaged one changes nothing."""
    with torch.inference_mode(False):
        from_file(adapter, *files.read(path), path)


def to_file(adapter: AdapterBase) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of a state file."""
    if not adapter.built:
        raise ValueError("there is nothing to save before the first batch; pass example= to adapt")
    tensors, scalars = AdapterState.view(adapter).to_tensors(adapter.source)
    if adapter.prepared:
        tensors |= {f"fresh/{n}": t for n, t in named_tensors(adapter.fresh.memory).items()}
    tensors |= {f"random/{device}": t for device, t in adapter.random.states.items()}
    header = {
        "version": __version__,
        "head": adapter.net.head,
        "classes": adapter.net.channels,
        "task": adapter.task,
        "batches": adapter.batches,
        "images": adapter.images,
        "updates": adapter.updates,
        "shrunk": adapter.net.runner.steps.shrunk,
        "prepared": adapter.prepared,
        "engine": {key: getattr(adapter.net.runner.settings, key) for key in MEASURED},
        "optimizer": scalars,
        **identity(adapter, adapter.method),
    }
    if adapter.monitor is not None:
        header["watch"] = {"marks": adapter.monitor.marks.to_dict(), "kept": []}
        tensors |= {f"watch/{n}": t for n, t in adapter.monitor.memory.state_dict().items()}
        for i, kept in enumerate(adapter.kept):
            parts, scalars = kept.to_tensors(adapter.source)
            tensors |= {f"kept{i}/{n}": t for n, t in parts.items()}
            header["watch"]["kept"].append(scalars)
    return tensors, header


def from_file(adapter: AdapterBase, tensors: dict[str, Tensor], header: dict[str, Any], path: str | Path) -> None:
    """Apply the contents of a state file; one that is wrong anywhere changes nothing."""
    header = {**OLDER, **header}
    try:
        refuse_foreign(adapter, header, path)
        attempt, settings = Attempt(), _settings_of(adapter, header, path)
        with _run_with(adapter, settings, attempt), restored_on_error(adapter, attempt), all_or_nothing(adapter):
            if not adapter.built:
                check_int("classes", header["classes"], 1)
                build(adapter, header["head"], header["classes"], header["task"])
                refuse_foreign(adapter, header, path)
            _apply(adapter, tensors, header, path)
            attempt.complete = True
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} holds no state of this adapter: {type(error).__name__}: {error}") from error


def _settings_of(adapter: AdapterBase, header: dict[str, Any], path: str | Path) -> RunSettings:
    """Return the settings to run with; those that were measured are the file's."""
    ours = adapter.net.runner.settings
    found = ours.unresolved or ours.measured
    settings = replace(ours, measured=found, **{key: header["engine"][key] for key in found})
    if settings.unresolved:
        raise ValueError(f"{path} does not say how its model ran: {brief(header['engine'])}")
    return settings


@contextmanager
def _run_with(adapter: AdapterBase, settings: RunSettings, attempt: Attempt) -> Iterator[None]:
    """Run all networks with other settings from now on, unless the attempt fails."""
    before, nets = adapter.net.runner.settings, networks(adapter, fresh=True)
    if settings == before:
        yield
        return
    try:
        for net in nets:
            net.use(settings)
        yield
    except BaseException:
        for net in nets if not attempt.complete else ():
            net.use(before)
        raise


def _apply(adapter: AdapterBase, tensors: dict[str, Tensor], header: dict[str, Any], path: str | Path) -> None:
    """Check everything, then apply it."""
    for count in ("batches", "images", "updates", "shrunk"):
        check_int(count, header[count], 0)
    parts = split_by_part(tensors, *PARTS)
    for device, generator in parts["random"].items():
        torch.Generator(device).set_state(generator)
    _prepare_as_saved(adapter, parts, header["prepared"], path)
    own = {f"{part}/{n}": t for part in ("net", "state", "policy", "optimizer") for n, t in parts[part].items()}
    state = AdapterState.from_tensors(adapter, own, header["optimizer"], path)
    counts = {count: header[count] for count in ("batches", "images", "updates", "shrunk")}
    state.progress = Progress(**counts, random=parts["random"])
    if adapter.monitor is not None:
        state.progress.marks = adapter.monitor.marks.loaded(header["watch"]["marks"])
        state.progress.rules = parts["watch"]
        for i, scalars in enumerate(header["watch"]["kept"]):
            kept = AdapterState.from_tensors(adapter, parts[f"kept{i}"], scalars, path)
            if not all(bool(t.isfinite().all()) for t in kept.weights.values() if t.is_floating_point()):
                raise ValueError(f"{path} does not fit: a state to go back to is not finite")
            state.progress.kept.append(kept)
    state.apply(adapter)


def _prepare_as_saved(adapter: AdapterBase, parts: Parts, prepared: bool, path: str | Path) -> None:
    """Make the adapter prepared with source images, or not, as the file is."""
    if prepared:
        complete(adapter, parts)
        check_fit("fresh", named_tensors(adapter.fresh.memory), parts["fresh"], path)
        memory = with_tensors(adapter.fresh.memory, parts["fresh"])
    elif adapter.prepared:
        adapter.fresh.apply(adapter)  # a fresh state is made with the source's weights
        memory = adapter.make_memory()
    else:
        return
    adapter.fresh, adapter.prepared = replace(adapter.fresh, memory=memory), prepared
