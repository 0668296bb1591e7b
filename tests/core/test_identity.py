"""What a state file must share with an adapter, also in files of before, and loads that fail half-way."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trueup
from trueup import Guard, rules
from trueup.core import files
from trueup.core.building import Attempt, restored_on_error
from trueup.testing import convnet, images
from trueup.testing.case import difference, play

XS = [images(16, seed=i, shift=1.0)[0] for i in range(6)]


def rewritten(path: Path, tensors: dict[str, Tensor] | None = None, **header: Any) -> Path:
    """Write a state file again with another header or other tensors."""
    old_tensors, old_header = files.read(path)
    files.write(path, tensors or old_tensors, {**old_header, **header})
    return path


def local_rule(limit: float) -> rules.Rule:
    @dataclass(frozen=True, kw_only=True)
    class Local(rules.Rule):
        limit: float
        names: tuple[str, ...] = ("a",)

    return Local(limit=limit)


class Worded(rules.Rule):
    """No dataclass of its own: its text alone says what it is."""

    def __init__(self, limit: float) -> None:
        object.__setattr__(self, "limit", limit)

    def __repr__(self) -> str:
        return f"Worded<{self.limit}>"


@pytest.mark.parametrize("made", [local_rule, Worded, lambda limit: rules.Drift(limit=limit)])
@pytest.mark.parametrize("text", [False, True])
def test_a_guard_is_known_by_its_rules(tmp_path: Path, made: Any, text: bool) -> None:
    """Files of before hold the guard's text, from now on they hold plain data."""
    guard, path = Guard(rules=(made(0.5),)), tmp_path / "state"
    adapter = trueup.adapt(convnet(), "tent", guard=guard)
    play(adapter, XS[:2])
    adapter.save(path)
    if text:
        rewritten(path, guard=repr(guard))
    else:
        assert isinstance(files.read(path)[1]["guard"], dict)
    twin = trueup.adapt(convnet(), "tent", guard=Guard(rules=(made(0.5),)))
    twin.load(path)
    assert torch.equal(twin(XS[2]), adapter(XS[2]))
    for other in (Guard(rules=(made(0.25),)), Guard(rules=(made(0.5),), window=128)):
        with pytest.raises(ValueError, match="another guard"):
            trueup.adapt(convnet(), "tent", guard=other).load(path)


def test_the_rule_that_differs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state"
    trueup.adapt(convnet(), "tent", guard=True, example=XS[0]).save(path)
    other = Guard(rules=(*rules.RULES[:-1], rules.Drift(limit=0.5)))
    with pytest.raises(ValueError, match=r"\{'rules': \{4: \{'limit': 0.25\}\}\}, here .*'limit': 0.5") as error:
        trueup.adapt(convnet(), "tent", guard=other).load(path)
    assert len(str(error.value)) < 200 + len(str(path))


def test_a_rule_with_nan_knows_its_own_file(tmp_path: Path) -> None:
    for _ in range(2):
        adapter = trueup.adapt(convnet(), "tent", guard=Guard(rules=(local_rule(float("nan")),)), example=XS[0])
        adapter.save(tmp_path / "state")
        adapter.load(tmp_path / "state")


@pytest.mark.parametrize(
    "text", ["-" * 100_000 + "1", "(" * 500, "Guard(", "__import__('os')", "\0", "Guard(rules=f())"]
)
def test_a_hostile_text_is_another_guard(tmp_path: Path, text: str) -> None:
    adapter = trueup.adapt(convnet(), "tent", guard=True, example=XS[0])
    adapter.save(tmp_path / "state")
    with pytest.raises(ValueError, match="another guard"):
        adapter.load(rewritten(tmp_path / "state", guard=text))


@pytest.mark.parametrize("method", ["shot", "cotta"])
@pytest.mark.parametrize("last", [False, True])
def test_a_load_that_fails_late_puts_layouts_and_weights_back(tmp_path: Path, method: str, last: bool) -> None:
    adapter, other = (trueup.adapt(convnet(), method, channels_last="auto", example=XS[0]) for _ in range(2))
    play(adapter, XS[:2])
    play(other, XS[2:5])
    other.save(tmp_path / "state")
    tensors, header = files.read(tmp_path / "state")
    name = next(name for name in tensors if name.startswith("policy/"))
    tensors[name] = tensors[name][:-1].clone()
    path = rewritten(tmp_path / "state", tensors, engine={**header["engine"], "channels_last": last})
    twin = adapter.fork()
    with pytest.raises(ValueError, match="state"):
        adapter.load(path)
    assert difference(adapter, twin) == []
    assert torch.equal(adapter(XS[5]), twin(XS[5]))


def test_an_interrupt_after_a_load_leaves_it_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trueup.core.isolation import Undo

    adapter, other = (trueup.adapt(convnet(), "tent", example=XS[0]) for _ in range(2))
    play(other, XS[:3])
    other.save(tmp_path / "state")

    def interrupted(undo: Undo) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Undo, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            adapter.load(tmp_path / "state")
    assert difference(adapter, other) == []


def test_attributes_come_back_unless_the_attempt_was_complete() -> None:
    adapter = trueup.adapt(convnet(), "tent", example=XS[0])

    def fail(attempt: Attempt, *, complete: bool) -> None:
        with restored_on_error(adapter, attempt):
            adapter.batches, adapter.surplus = 7, 1
            attempt.complete = complete
            raise RuntimeError

    for complete in (False, True):
        with pytest.raises(RuntimeError):
            fail(Attempt(), complete=complete)
        assert (adapter.batches == 7, hasattr(adapter, "surplus")) == (complete, complete)
