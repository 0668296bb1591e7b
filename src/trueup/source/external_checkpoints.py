"""Checkpoints of other people: read without running anything in them, their names brought to those of a model."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from trueup.model.copying import copy_model
from trueup.model.heads import find_head

INSIDE = ("model_dict", "state_dict", "model")  # where checkpoints keep their tensors
WRAPPERS = ("network.", "vit_backbone.")  # what featurizers call the torchvision or timm network in them
TWINS = {"network.0.": "featurizer.", "network.1.": "classifier."}  # the same modules once more, in a Sequential
DEEPEST = 100  # settings in settings


def load_foreign(path: str | Path, model: nn.Module, example: Tensor) -> dict[str, Any]:
    """Fill a model from a checkpoint of DomainBed, of TSD's authors, or a plain state dict; its own settings come back.

    All of it fits or nothing changes. Parts that no prediction needs are named under "ignored".
    """
    content = read_checkpoint(path)
    state = state_of(content, path)
    ours = model.state_dict()
    settings = {key: value for key, value in content.items() if key not in INSIDE and _plain(value, path)}
    if any(name.startswith("featurizer.") for name in state.keys() - ours.keys()):
        known = ("featurizer", "classifier", "network")
        ignored = sorted({name.partition(".")[0] for name in state}.difference(known))
        settings |= {"ignored": ignored} if ignored else {}
        state = _renamed(state, model, example, path)
    refuse(misfits(ours, state), path)
    model.load_state_dict(state, strict=False)
    return settings


def read_checkpoint(path: str | Path) -> Any:
    """What a .safetensors file or one of torch.save holds; a ValueError for damage and for anything that is code."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file, or was cut off: {error}") from error
    with path.open("rb") as file:
        return _read_safely(file, path)


def _read_safely(file: BinaryIO, path: Path) -> Any:
    """Tensors and plain values of a file that torch.save made."""
    try:
        with _numbers_only():
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can break the reader anywhere, and with any error
        wanted = re.search(r"(?:GLOBAL|unrecognized function|add_safe_globals`,? but got) (\S+)", str(error))
        if wanted is not None:
            raise ValueError(
                f"{path} is refused: to read it, {wanted[1]} would have to run. Nothing was executed. "
                f"Whoever trusts its maker can save the model's state_dict() alone"
            ) from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is no checkpoint of torch, or was cut off: {reason}") from error


def state_of(content: Any, path: str | Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint's content, out of its wrapper and without the prefix of DataParallel."""
    for key in INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        held = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(f"{path} holds no state dict but: {held or 'nothing'}")
    state = {str(name): tensor for name, tensor in content.items()}
    odd = [n for n, t in state.items() if t.is_meta or t.layout != torch.strided]
    refuse([f"{name} is no plain tensor with values" for name in odd], path)
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return state


def misfits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """What keeps a state dict from filling another exactly, the kinds by turns; BatchNorm's counts may be missing."""
    missing = [f"{n} is missing" for n in ours if n not in theirs and not n.endswith("num_batches_tracked")]
    leftover = [f"{n} is unexpected" for n in theirs if n not in ours]
    misshapen = [
        f"{n} is {tuple(theirs[n].shape)} {theirs[n].dtype}, not {tuple(t.shape)}"
        for n, t in ours.items()
        if n in theirs and (theirs[n].shape != t.shape or theirs[n].is_floating_point() != t.is_floating_point())
    ]
    return [each for each in chain(*zip_longest(missing, leftover, misshapen)) if each is not None]


def refuse(complaints: list[str], path: str | Path) -> None:
    """Raise a ValueError with the first five, if there are any."""
    if complaints:
        more = f"; and {len(complaints) - 5} more" if len(complaints) > 5 else ""
        raise ValueError(f"{path} does not fit the model: {'; '.join(complaints[:5])}{more}")


def probe_head(model: nn.Module, example: Tensor) -> str:
    """The name of a model's head. A copy runs, in eval mode, so that the model stays as it is."""
    return find_head(copy_model(model).eval(), example, least=1)[0]  # a single label has one output


def _renamed(state: dict[str, Tensor], model: nn.Module, example: Tensor, path: str | Path) -> dict[str, Tensor]:
    """Featurizer and classifier under the model's own names."""
    refuse(_unlike_twins(state), path)
    body, head = _part(state, "featurizer."), _part(state, "classifier.")
    if all(name.startswith("fc.") for name in head):
        head = _part(head, "fc.")
    if not head or head.keys() - {"weight", "bias"}:
        names = ", ".join(n for n in state if n.startswith("classifier."))
        raise ValueError(
            f"{path} has a classifier that is not one linear layer ({names or 'none'}): no head can take it"
        )
    ours = model.state_dict()
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in body) and not any(name.startswith(prefix) for name in ours):
            body = _part(body, prefix)
    # the authors' VGG renames the layers before the last
    body = {re.sub(r"^classifier\.classifier(\d)", r"classifier.\1", name): tensor for name, tensor in body.items()}
    where = probe_head(model, example)
    named = {f"{where}.{name}": tensor for name, tensor in head.items()}
    refuse([f"{name} is given twice" for name in named.keys() & body.keys()], path)
    return body | named


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _unlike_twins(state: Mapping[str, Tensor]) -> list[str]:
    """Under "network." both repositories keep featurizer and classifier again; other weights there leave doubt."""
    wrong = []
    for name, tensor in state.items():
        twin = next((name.replace(old, new, 1) for old, new in TWINS.items() if name.startswith(old)), None)
        if twin is not None and (twin not in state or not torch.equal(tensor, state[twin])):
            wrong.append(f"{name} is not {twin}")
        elif twin is None and name.startswith("network."):
            wrong.append(f"{name} is unexpected")
    return wrong


def _plain(value: Any, path: str | Path) -> bool:
    """Whether it holds plain values alone; level by level, each group once, as a file may have it a billion times."""
    level = [value]
    for _ in range(DEEPEST):
        groups = {id(each): each for each in level if isinstance(each, dict | list | tuple | set)}
        if not all(id(v) in groups or v is None or isinstance(v, bool | int | float | str) for v in level):
            return False
        level = [v for g in groups.values() for v in (chain(g.keys(), g.values()) if isinstance(g, dict) else g)]
        if not level:
            return True
    raise ValueError(f"{path} holds settings in settings, more than {DEEPEST} deep: save the state_dict() alone")


class _NumberType:
    """Stands in for numpy.dtype while a file is read: numbers and strings, nothing that could hold an object."""

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r"b1|[iu][1248]|f[248]|U\d+", code):
            raise ValueError(f"a numpy value of type {code!r} is no setting")
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", ">", "=", "|"):
            raise ValueError(f"{state[1]!r} is no byte order")
        self.order = state[1]


def _number(kind: _NumberType, data: bytes) -> Any:
    """Stands in for numpy's function that makes a scalar; gives Python's own number."""
    return np.frombuffer(data, dtype=kind.order + kind.code)[0].item()


@contextmanager
def _numbers_only() -> Iterator[None]:
    """Inside, torch's safe reader takes numpy scalars beside tensors and plain values, and nothing else.

    DomainBed draws hyper-parameters with numpy. What the process allowed for its own files does not count here.
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
