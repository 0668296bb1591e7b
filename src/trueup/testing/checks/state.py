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
from trueup.core.state import named_tensors
from trueup.testing.case import Case, check, difference, frozen_tensors, play, raises, reload, same


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
def guarded_reset_and_resume(case: Case) -> None:
    """With a guard, too, reset and resume are exact."""
    xs = case.stream(14)
    adapter, fresh = case.adapter(guard=True), case.adapter(guard=True, example=xs[0])
    play(adapter, xs[:12])
    later = reload(adapter, case.adapter(guard=True))
    assert difference(adapter, later) == []
    assert same(play(adapter, xs[12:]), play(later, xs[12:]))
    adapter.reset()
    assert difference(fresh, adapter) == []


@check
def robust_statistics(case: Case) -> None:
    """With robust statistics reset and resume are exact, and answers stay finite on single images."""
    xs = case.stream(6)
    adapter, fresh = case.adapter(norm="robust"), case.adapter(norm="robust", example=xs[0])
    play(adapter, [*xs[:3], xs[0][:1]])
    later = reload(adapter, case.adapter(norm="robust"))
    answers = play(adapter, [*xs[3:], xs[1][:1]])
    assert all(a.isfinite().all() for a in answers)
    assert same(answers, play(later, [*xs[3:], xs[1][:1]]))
    adapter.reset()
    assert difference(fresh, adapter) == []


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
                with raises(ValueError, f"{what} was taken"):
                    victim.load(path)
                assert difference(before, victim) == [], what


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
    known = {id(t) for t in named_tensors(adapter.state).values()}
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
    parts: list[Tensor] = list(adapter.source.values())
    for part in (model, adapter.net, adapter.state, adapter.fresh.memory):
        parts += [*part.parameters(), *part.buffers()]
    where = [t.untyped_storage().data_ptr() for t in parts if t.numel()]  # empty ones have none
    assert len(where) == len(set(where))


@check
def bounded_state(case: Case) -> None:
    """Check that the state stops growing, however long the stream."""
    few: dict[str, Any] = {"per_class": 5} if case.has("per_class") else {}
    adapter = case.adapter(**few)
    sizes = []
    for seed in range(2):
        play(adapter, case.stream(20, seed=seed))
        sizes.append(sum(t.nbytes for t in named_tensors(adapter.state).values()))
    assert sizes[1] <= sizes[0], f"{sizes[0]} bytes after 20 batches, {sizes[1]} after 40"
