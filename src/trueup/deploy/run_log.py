"""Log of a folder of masks: the finished images, with the adapter's state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trueup.atomic import single_writer, write_atomic
from trueup.core.adapter import Adapter
from trueup.deploy.folder_images import JOURNAL, ImageFile

FORMAT = "trueup-segment-1"


class RunLog:
    """Two files in OUT/.trueup: the journal, and the state file that it names."""

    def __init__(self, out: Path, settings: dict[str, Any], *, fresh: bool) -> None:
        """Resume the log of the folder, which must have the same settings; `fresh` starts over."""
        self.path, self.settings = out / JOURNAL, settings
        self.done: dict[str, list[int]] = {}
        self.state, self.saves = "", 0
        if fresh:
            self.path.unlink(missing_ok=True)
        if not self.path.exists():
            return
        try:
            content = json.loads(self.path.read_bytes())
            form, there = content["format"], content["settings"]
            self.done, self.state, self.saves = content["done"], content["state"], content["saves"]
            kinds = {"settings": dict, "done": dict, "state": str, "saves": int}
            if wrong := [key for key, kind in kinds.items() if not isinstance(content[key], kind)]:
                raise TypeError(f"{wrong[0]} is a {type(content[wrong[0]]).__name__}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{self.path} is damaged; choose another --out, or start over with --fresh") from error
        if form != FORMAT:
            raise ValueError(f"{self.path} has the format {form!r}, not {FORMAT!r}; choose another --out")
        if changes := _changes(there, settings):
            raise ValueError(
                f"{out} was begun with other settings: {changes}; choose another --out, or start over with --fresh, "
                f"which replaces masks one by one"
            )

    def has(self, image: ImageFile) -> bool:
        """Return True if an image is finished and unchanged, and its masks exist."""
        with suppress(OSError):
            return self.done.get(image.name) == image.stamp() and all(mask.is_file() for mask in image.masks)
        return False

    def load(self, adapter: Adapter) -> None:
        """Load the adapter's state."""
        if self.state:
            try:
                adapter.load(self.path.with_name(self.state))
            except (ValueError, OSError) as error:
                raise ValueError(f"the saved state cannot be loaded: {error}; start over with --fresh") from error

    def save(self, adapter: Adapter) -> None:
        """Write the state, then the journal; until then the old journal and its state stay valid."""
        self.saves += 1
        self.state = f"state-{self.saves}.safetensors"
        adapter.save(self.path.with_name(self.state))
        content = {"format": FORMAT, "settings": self.settings, "state": self.state, "saves": self.saves}
        write_atomic(self.path, json.dumps({**content, "done": self.done}).encode())
        for old in self.path.parent.glob("state-*.safetensors"):
            if old.name != self.state:
                old.unlink()


def _changes(there: dict[str, Any], here: dict[str, Any]) -> str:
    names = [name for name in sorted(there.keys() | here.keys()) if there.get(name) != here.get(name)]
    if "method" in names:  # then all hyper-parameters differ, too
        names = [name for name in names if "." not in name]
    return ", ".join(f"{name} was {there.get(name)!r} and is {here.get(name)!r}" for name in names)


@contextmanager
def exclusive_access(out: Path) -> Iterator[None]:
    """Create a folder of masks, refuse it if another process writes to it, and remove partial files."""
    folder = (out / JOURNAL).parent
    folder.mkdir(parents=True, exist_ok=True)
    with single_writer(folder / ".lock", f"another process is writing to {out}; wait for it, or choose another --out"):
        for partial in out.rglob(".*.partial"):
            partial.unlink()
        yield
