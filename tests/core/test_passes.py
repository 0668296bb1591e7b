"""Observers see each forward pass and answer, change nothing, and belong to one adapter alone."""

import copy
import pickle
from pathlib import Path
from typing import Any

import torch

import trueup
from trueup.testing import convnet, images


def observed(**options: Any) -> tuple[trueup.Adapter, list[str], list[Any]]:
    x = images(24, seed=0, shift=1.0)[0]
    adapter = trueup.adapt(convnet(), "sar", example=x[:2], **options)
    passes: list[str] = []
    answers: list[Any] = []
    adapter.forward_observers.append(lambda net, out: passes.append("pass"))
    adapter.answer_observers.append(lambda net, out, answer: answers.append((out, answer)))
    return adapter, passes, answers


def test_every_pass_and_every_answer_is_seen() -> None:
    x = images(24, seed=0, shift=1.0)[0]
    adapter, passes, answers = observed()
    plain = trueup.adapt(convnet(), "sar", example=x[:2])
    given = adapter(x)
    assert torch.equal(given, plain(x))
    assert passes == ["pass", "pass"]  # a sharpness-aware step has two
    ((out, answer),) = answers
    assert torch.equal(answer, given)
    assert torch.equal(out.logits, answer)


def test_copies_have_no_observers() -> None:
    adapter, _, _ = observed()
    for twin in (adapter.fork(), copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))):
        assert (twin.forward_observers, twin.answer_observers) == ([], [])
    assert len(adapter.forward_observers) == len(adapter.answer_observers) == 1


def test_observers_stay_when_a_state_is_loaded(tmp_path: Path) -> None:
    adapter, passes, answers = observed()
    x = images(24, seed=0, shift=1.0)[0]
    adapter.save(tmp_path / "state.safetensors")
    adapter.load(tmp_path / "state.safetensors")
    adapter(x)
    assert (len(passes), len(answers)) == (2, 1)
