"""Models that do unusual things: keep results, change their input or buffers, recompute."""

import copy
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from chatty import Chatty, X
from torch import Tensor, nn

import trueup
from trueup import Output, SplitModel
from trueup.testing import convnet, images


class Hoarder(nn.Module):
    """Keeps a result of its last forward, as feature extractors do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = convnet()
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(x)
        return self.kept


def test_models_that_hold_results_can_be_copied() -> None:
    adapter = trueup.adapt(Hoarder(), "tsd")
    adapter(X)
    twin, plain = copy.deepcopy(adapter), adapter.unwrap()
    assert torch.equal(twin(X), adapter(X))
    assert plain(X).shape == (16, 6)
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = nn.Sequential(nn.Linear(4, 4), nn.utils.weight_norm(nn.Linear(4, 3)))
    assert trueup.adapt(old, "tsd")(torch.randn(5, 4)).isfinite().all()


def test_models_that_cannot_be_copied_or_changed_are_refused() -> None:
    model = convnet()
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot be copied"):
        trueup.adapt(model, "tent")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.trace(convnet(), X)
    with pytest.raises(TypeError, match="TorchScript"):
        trueup.adapt(scripted, "tent")
    with pytest.raises(ValueError, match="seed='a' must be an integer"):
        trueup.adapt(convnet(), "tent", seed="a")


def test_a_view_of_a_parameter_is_not_cut_off() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.other = self.inner.weight.t()

    with pytest.raises(ValueError, match="cannot be copied"):
        trueup.adapt(Tied(), "tent")


def test_a_copy_made_under_inference_mode_goes_on() -> None:
    adapter = trueup.adapt(convnet(), "tsd")
    adapter(X)
    with torch.inference_mode():
        twin = copy.deepcopy(adapter)
    assert torch.equal(twin(X), adapter(X))


class InPlace(nn.Module):
    """Normalises its input in place, counts its calls and remembers a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = convnet()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean + 0.1 * (x.mean() - self.mean)
        return self.inner(x.sub_(0.5).div_(0.5) + self.mean)


def test_models_that_change_their_input_or_buffers(tmp_path: Any) -> None:
    model = InPlace().eval()
    with torch.no_grad():
        expected = copy.deepcopy(model)(X.clone())
    x = X.clone()
    adapter = trueup.adapt(model, "tsd", norm="source", steps=2)
    torch.testing.assert_close(adapter(x), expected)
    assert torch.equal(x, X)
    adapter.save(tmp_path / "state")
    other = trueup.adapt(model, "tsd", norm="source", steps=2)
    other.load(tmp_path / "state")
    assert torch.equal(adapter(X), other(X))
    assert int(adapter.net.model.calls) == 4
    adapter.reset()
    assert int(adapter.net.model.calls) == 0
    torch.testing.assert_close(adapter(X), expected)


class Caching(nn.Module):
    """Registers a buffer as it runs, has a mask that is a view, and a queue that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = convnet()
        self.register_buffer("code", None)
        self.register_buffer("mask", torch.ones(1, dtype=torch.bool).expand(4))
        self.register_buffer("queue", torch.zeros(0))
        self.cache: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.code is None:
            self.code = torch.ones(1)
        self.queue = torch.cat((self.queue, torch.ones(1)))
        self.cache["last"] = self.inner(x * self.code)
        return self.cache["last"]


def test_models_that_grow_as_they_run(tmp_path: Any) -> None:
    adapter = trueup.adapt(Caching(), "tsd")
    first = [adapter(X), adapter(X)]
    assert torch.equal(copy.deepcopy(adapter)(X), adapter(X))
    adapter.save(tmp_path / "state")
    other = trueup.adapt(Caching(), "tsd", example=X)
    other.load(tmp_path / "state")
    assert torch.equal(adapter(X), other(X))
    adapter.reset()
    assert len(adapter.net.model.queue) == 0
    assert all(torch.equal(a, adapter(X)) for a in first)


class Checkpointed(nn.Module):
    """Recomputes its body in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        inner = convnet()
        self.first, self.body, self.head, self.reentrant = inner[0], inner[1:-1], inner[-1], reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.utils.checkpoint.checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the probe, which needs no gradient
@pytest.mark.parametrize("norm", ["source", "batch", "ema"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_normalises_as_the_forward_did(norm: str, reentrant: bool) -> None:
    plain = trueup.adapt(convnet(), "tsd", norm=norm, lr=1e-3, steps=2)
    saving = trueup.adapt(Checkpointed(reentrant), "tsd", norm=norm, lr=1e-3, steps=2)
    for seed in range(3):
        x = images(16, seed=seed, shift=1.0)[0]
        torch.testing.assert_close(plain(x), saving(x), rtol=1e-4, atol=1e-4)
    for a, b in zip(plain.net.parameters(), saving.net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not any(m._forward_pre_hooks for m in saving.modules())


def test_hooks_of_a_method_see_the_statistics() -> None:
    """Also after a backward that recomputes: a teacher cloned there must not lose them."""
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Cloning(Chatty):
        def after(self, net: SplitModel, out: Output, state: Any) -> None:
            seen.append(all(b is not None for m in net.modules() for b in m._buffers.values()))

    trueup.adapt(Checkpointed(False), Cloning())(X)
    assert seen == [True] * 4
