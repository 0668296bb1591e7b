"""Checks of the state of a method: resets, files, copies, bounds."""

import copy
import inspect
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trueup.core.adapt import adapt
from trueup.core.registry import list_methods
from trueup.testing.case import Case, difference, frozen_tensors, play, reload, same, storages
from trueup.testing.checks.contract import check


@check
def loss_and_predict_only_read(case: Case) -> None:
    """Neither hook changes the model, the state or what the other returns."""
    adapter = case.adapter()
    play(adapter, case.stream(2))
    method, net, state, x = adapter.hooks, adapter.net, adapter.state, case.stream(3)[2]
    out = method.forward(net, x, state)
    with torch.no_grad():
        method.observe(net, out, state)
    before = frozen_tensors(adapter)
    first, loss = method.predict(net, out, state), method.loss(net, out, state)
    again, second = method.loss(net, out, state), method.predict(net, out, state)
    assert torch.equal(first, second)
    assert (loss is None and again is None) or (loss is not None and again is not None and torch.equal(loss, again))
    assert same(before, frozen_tensors(adapter))


@check
def reset_is_exact(case: Case) -> None:
    """After reset the adapter equals a fresh one, and the stream gives the same answers, to the bit."""
    xs = case.stream(4)
    fresh, adapter = case.adapter(example=xs[0]), case.adapter()
    first = play(adapter, xs)
    adapter.reset()
    assert difference(fresh, adapter) == []
    assert same(first, play(adapter, xs))


@check
def episodic_forgets(case: Case) -> None:
    """Check that an episodic adapter answers each batch as a fresh one does, to the bit."""
    xs = case.stream(3)
    adapter = case.adapter(episodic=True)
    assert same(play(adapter, xs), [case.adapter()(x) for x in xs])


@check
def resume_is_exact(case: Case) -> None:
    """Check that a state saved within a stream and loaded by a new adapter continues and resets bit-exactly."""
    xs = case.stream(6)
    adapter = case.adapter()
    start = play(adapter, xs[:3])
    other = reload(adapter, case.bare())
    assert difference(adapter, other) == []
    assert same(play(adapter, xs[3:]), play(other, xs[3:]))
    assert difference(adapter, other) == []
    other.reset()
    assert same(start, play(other, xs[:3]))


@check
def foreign_state_refused(case: Case) -> None:
    """Another method's, another model's, a truncated, an altered file: an error, and nothing has changed."""
    adapter = case.adapter()
    play(adapter, case.stream(2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        adapter.save(path)
        blob = path.read_bytes()
        strangers = {"another model": case.adapter(case.model(seed=1))}
        name = next(n for n in list_methods(case.task) if n != case.method.info.name)
        strangers["another method"] = adapt(case.model(), name, multilabel=case.multilabel)
        files = {"truncated": blob[:-10], "empty": b"", "text": b"not a state", "longer": blob + b"\0"}
        files |= {f"byte {i}": _flipped(blob, i) for i in (0, 9, len(blob) // 2, len(blob) - 1)}
        for what, stranger in strangers.items():
            play(stranger, case.stream(1))
            stranger.save(path)
            files[what] = path.read_bytes()
        for what, content in files.items():
            path.write_bytes(content)
            for victim in (adapter, case.bare()):
                before = copy.deepcopy(victim)
                try:
                    victim.load(path)
                except ValueError:
                    assert difference(before, victim) == [], what
                else:
                    raise AssertionError(f"{what} was taken")


def _flipped(blob: bytes, i: int) -> bytes:
    return blob[:i] + bytes([blob[i] ^ 1]) + blob[i + 1 :]


@check
def copies_go_on_alone(case: Case) -> None:
    """Check that a deepcopy and a pickled copy continue bit-exactly, and leave the original alone."""
    xs = case.stream(5)
    adapter = case.adapter()
    play(adapter, xs[:3])
    twin = copy.deepcopy(adapter)
    thawed = pickle.loads(pickle.dumps(adapter))
    expected = play(twin, xs[3:])
    assert same(expected, play(thawed, xs[3:]))
    assert same(expected, play(adapter, xs[3:]))


@check
def every_tensor_is_registered(case: Case) -> None:
    """All tensors of the state are its buffers or parameters; the method holds none, and only tensors change."""
    adapter = case.adapter()
    play(adapter, case.stream(2))
    known = {id(t) for t in (*adapter.state.parameters(), *adapter.state.buffers())}
    loose = [path for path, t in _loose_tensors(adapter.state, "state", set()) if id(t) not in known]
    assert not loose, f"not registered: {loose}"
    assert not _loose_tensors(adapter.method, "method", set())
    before = {n: _plain(m) for n, m in adapter.state.named_modules()}
    play(adapter, case.stream(2, seed=1))
    assert before == {n: _plain(m) for n, m in adapter.state.named_modules()}, "an attribute that is no tensor changed"


def _plain(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | None)}


def _loose_tensors(value: Any, path: str, seen: set[int]) -> list[tuple[str, Tensor]]:
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple | set):
        items = list(enumerate(value))
    else:
        items = list(vars(value).items()) if hasattr(value, "__dict__") and not inspect.isroutine(value) else []
    return [found for key, inner in items for found in _loose_tensors(inner, f"{path}.{key}", seen)]


@check
def no_shared_storage(case: Case) -> None:
    """No tensor is an alias of another: source, model, state, what reset goes back to."""
    model = case.model()
    adapter = case.adapter(model)
    play(adapter, case.stream(2))
    assert adapter.fresh is not None
    parts: list[Tensor] = list(adapter.source.values())
    for part in (model, adapter.net, adapter.state, adapter.fresh.memory):
        parts += [*part.parameters(), *part.buffers()]
    where = storages(parts)
    assert len(where) == len(set(where))


@check
def bounded_state(case: Case) -> None:
    """Check that the state stops growing, however long the stream."""
    few: dict[str, Any] = {"per_class": 5} if case.has("per_class") else {}
    adapter = case.adapter(**few)

    def size() -> int:
        return sum(t.numel() * t.element_size() for t in (*adapter.state.parameters(), *adapter.state.buffers()))

    play(adapter, case.stream(20))
    limit = size()
    play(adapter, case.stream(20, seed=1))
    assert size() <= limit, f"{limit} bytes after 20 batches, {size()} after 40"
