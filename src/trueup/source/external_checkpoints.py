"""Checkpoints of other projects, read without running code in them and renamed to fit a model."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trueup.model.copy_model import copy_model
from trueup.model.heads import find_head

INSIDE = ("model_dict", "state_dict", "model")  # keys of the state dict in a checkpoint
WRAPPERS = ("network.", "vit_backbone.")  # prefixes of the torchvision or timm network in a featurizer
TWINS = {"network.0.": "featurizer.", "network.1.": "classifier."}  # the same modules again, in a Sequential
DEEPEST = 100  # levels of nested settings


def load_external(path: str | Path, model: nn.Module, example: Tensor) -> dict[str, Any]:
    """Load a checkpoint of DomainBed, of the TSD authors, or a plain state dict into a model; return its settings.

    If anything does not fit, the model stays unchanged. Parts that prediction does not need are listed as "ignored".
    """
    content = read_external(path)
    state = find_state_dict(content, path)
    ours = model.state_dict()
    settings = {key: value for key, value in content.items() if key not in INSIDE and _plain(value, path)}
    if any(name.startswith("featurizer.") for name in state.keys() - ours.keys()):
        known = ("featurizer", "classifier", "network")
        ignored = sorted({name.partition(".")[0] for name in state}.difference(known))
        settings |= {"ignored": ignored} if ignored else {}
        state = _renamed(state, model, example, path)
    refuse_misfits(find_misfits(ours, state), path)
    model.load_state_dict(state, strict=False)
    return settings


def read_external(path: str | Path) -> Any:
    """Read a .safetensors or torch.save file; raise a ValueError if it is damaged or holds code."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file, or was cut off: {error}") from error
    with path.open("rb") as file, _numbers_only():
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file can raise any error
            wanted = re.search(r"(?:GLOBAL|unrecognized function|add_safe_globals`,? but got) (\S+)", str(error))
            if wanted is not None:
                raise ValueError(
                    f"{path} is refused: to read it, {wanted[1]} would have to run. Nothing was executed. "
                    f"If you trust its author, save the model's state_dict() alone"
                ) from error
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{path} is not a torch checkpoint, or was cut off: {reason}") from error


def find_state_dict(content: Any, path: str | Path) -> dict[str, Tensor]:
    """Return the state dict in a checkpoint, without its wrapper and the prefix of DataParallel."""
    for key in INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        held = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(f"{path} holds no state dict but: {held or 'nothing'}")
    state = {str(name): tensor for name, tensor in content.items()}
    odd = [n for n, t in state.items() if t.is_meta or t.layout != torch.strided]
    refuse_misfits([f"{name} is not a plain tensor with values" for name in odd], path)
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return state


def find_misfits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Return why a state dict does not fit another, mixing the kinds; BatchNorm's counts may be missing."""
    missing = [f"{n} is missing" for n in ours if n not in theirs and not n.endswith("num_batches_tracked")]
    leftover = [f"{n} is unexpected" for n in theirs if n not in ours]
    misshapen = [
        f"{n} is {tuple(theirs[n].shape)} {theirs[n].dtype}, not {tuple(t.shape)}"
        for n, t in ours.items()
        if n in theirs and (theirs[n].shape != t.shape or theirs[n].is_floating_point() != t.is_floating_point())
    ]
    return [each for each in chain(*zip_longest(missing, leftover, misshapen)) if each is not None]


def refuse_misfits(complaints: list[str], path: str | Path) -> None:
    """Raise a ValueError with the first five complaints, if there are any."""
    if complaints:
        more = f"; and {len(complaints) - 5} more" if len(complaints) > 5 else ""
        raise ValueError(f"{path} does not fit the model: {'; '.join(complaints[:5])}{more}")


def probe_head(model: nn.Module, example: Tensor) -> str:
    """Find the name of a model's head by running a copy in eval mode."""
    return find_head(copy_model(model).eval(), example, min_channels=1)[0]  # a single label has one output


def _renamed(state: dict[str, Tensor], model: nn.Module, example: Tensor, path: str | Path) -> dict[str, Tensor]:
    """Rename featurizer and classifier to the model's own names."""
    refuse_misfits(_unlike_twins(state), path)
    body, head = take_prefix(state, "featurizer."), take_prefix(state, "classifier.")
    if all(name.startswith("fc.") for name in head):
        head = take_prefix(head, "fc.")
    if not head or head.keys() - {"weight", "bias"}:
        names = ", ".join(n for n in state if n.startswith("classifier."))
        raise ValueError(
            f"{path} has a classifier that is not one linear layer ({names or 'none'}), so no head fits it"
        )
    ours = model.state_dict()
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in body) and not any(name.startswith(prefix) for name in ours):
            body = take_prefix(body, prefix)
    # the authors' VGG renames the layers before the last
    body = {re.sub(r"^classifier\.classifier(\d)", r"classifier.\1", name): tensor for name, tensor in body.items()}
    where = probe_head(model, example)
    named = {f"{where}.{name}": tensor for name, tensor in head.items()}
    refuse_misfits([f"{name} is given twice" for name in named.keys() & body.keys()], path)
    return body | named


def take_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _unlike_twins(state: Mapping[str, Tensor]) -> list[str]:
    """Return where the copies of featurizer and classifier under "network." differ from them."""
    wrong = []
    for name, tensor in state.items():
        twin = next((name.replace(old, new, 1) for old, new in TWINS.items() if name.startswith(old)), None)
        if twin is not None and (twin not in state or not torch.equal(tensor, state[twin])):
            wrong.append(f"{name} is not {twin}")
        elif twin is None and name.startswith("network."):
            wrong.append(f"{name} is unexpected")
    return wrong


def _plain(value: Any, path: str | Path) -> bool:
    """Return True if a value is made of plain values; each container is visited once, as a file may repeat it."""
    level = [value]
    for _ in range(DEEPEST):
        groups = {id(each): each for each in level if isinstance(each, dict | list | tuple | set)}
        if not all(id(v) in groups or v is None or isinstance(v, bool | int | float | str) for v in level):
            return False
        level = [v for g in groups.values() for v in (chain(g.keys(), g.values()) if isinstance(g, dict) else g)]
        if not level:
            return True
    raise ValueError(f"{path} nests settings more than {DEEPEST} deep: save the state_dict() alone")


class _NumberType:
    """Replacement of numpy.dtype while a file is read: numbers and strings, no objects."""

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r"b1|[iu][1248]|f[248]|U\d+", code):
            raise ValueError(f"a numpy value of type {code!r} is not a setting")
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", ">", "=", "|"):
            raise ValueError(f"{state[1]!r} is not a byte order")
        self.order = state[1]


def _number(kind: _NumberType, data: bytes) -> Any:
    """Replace numpy's scalar constructor; return a Python number."""
    return np.frombuffer(data, dtype=kind.order + kind.code)[0].item()


@contextmanager
def _numbers_only() -> Iterator[None]:
    """Let torch's safe reader accept numpy scalars, which DomainBed's hyper-parameters are, and nothing else.

    Types that the process has allowed for its own files are not allowed inside the block.
    """
    allowed: list[tuple[Callable[..., Any], str]] = [
        (_NumberType, "numpy.dtype"),
        (_number, "numpy.core.multiarray.scalar"),  # numpy 1
        (_number, "numpy._core.multiarray.scalar"),  # numpy 2
    ]
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(allowed):  # type: ignore[arg-type]
            yield
    finally:
        torch.serialization.add_safe_globals(before)
