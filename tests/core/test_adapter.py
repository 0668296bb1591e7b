"""The adapter's own behaviour, beyond the contract of methods."""

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from chatty import Chatty, X, chatty
from torch import Tensor, nn

import trueup
from trueup import GradientMethod, Info, Method, Output, SplitModel
from trueup.testing import convnet, images
from trueup.testing.case import play


def test_unknown_names_come_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"no method is called 'tetn'; did you mean 'tent'\? There are: source, bn"):
        trueup.adapt(convnet(), "tetn")
    with pytest.raises(TypeError, match=r"tsd has no hyper-parameter 'neighbours'; did you mean 'neighbors'\?"):
        trueup.adapt(convnet(), "tsd", neighbours=3)


def test_a_method_object_serves_too() -> None:
    tent = trueup.get_method("tent")(lr=0.5)
    assert trueup.adapt(convnet(), tent).method is tent
    with pytest.raises(TypeError, match=r"go into Tent\(\.\.\.\): lr"):
        trueup.adapt(convnet(), tent, lr=0.1)
    with pytest.raises(TypeError, match="name or a Method"):
        trueup.adapt(convnet(), 3)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        trueup.adapt(lambda x: x, "tent")
    with pytest.raises(TypeError, match="an adapter already"):
        trueup.adapt(trueup.adapt(convnet(), "tent"), "tent")


def test_a_failed_call_does_not_move_the_random_stream() -> None:
    a, b = chatty(limit=100), chatty(limit=100)
    with pytest.raises(ValueError, match="cannot take"):
        a(X[:, :2])
    assert torch.equal(a(X), b(X))


def test_repr_before_and_after_the_first_batch() -> None:
    adapter = trueup.adapt(convnet(), "tent")
    assert repr(adapter).endswith("waiting for its first batch")
    adapter(X)
    assert repr(adapter).endswith("updates 80 of 4.1k values, head 'head'")
    assert repr(adapter).startswith("Tent(lr=0.001, params='norm', steps=1, norm='batch', episodic=False)")


@pytest.mark.parametrize(
    ("method", "hyper", "values"),
    [("sar", {}, 32), ("deyo", {}, 32), ("sar", {"spared": 0.0}, 80), ("tast", {}, 0), ("source", {}, 0)],
    ids=str,
)
def test_repr_counts_the_models_values_that_really_move(method: str, hyper: dict[str, float], values: int) -> None:
    """Layers of 16 and 24 channels have a weight and a bias for each; of the two SAR and DeYO spare the last."""
    adapter = trueup.adapt(convnet(), method, example=X, **hyper)
    assert f"updates {values} of 4.1k values" in repr(adapter)


def test_unwrap_is_a_plain_copy() -> None:
    adapter = trueup.adapt(convnet(), "tent", lr=0.1, norm="source")
    adapter(X)
    plain = adapter.unwrap()
    assert type(plain) is nn.Sequential
    with torch.no_grad():
        expected = plain(X)
        assert torch.equal(adapter(X), expected)
        assert torch.equal(plain(X), expected)  # adapting further does not touch it


def test_messages_say_what_to_do() -> None:
    adapter = trueup.adapt(convnet(), "tent")
    bad = X.clone()
    bad[[2, 5], 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN, infinite or beyond 1e\+12, in rows \[2, 5\]"):
        adapter(bad)
    with pytest.raises(ValueError, match=r"x\.float\(\) / 255"):
        adapter((X * 100).to(torch.uint8))
    with pytest.raises(ValueError, match=r"convert x with x\.to\(torch\.float32\)"):
        adapter(X.double())
    with pytest.raises(ValueError, match=r"cannot take images of shape \(2, 16, 16\)"):
        adapter(X[:, :2])
    with pytest.raises(ValueError, match="x is on meta, the model on cpu"):
        adapter(X.to("meta"))
    with pytest.raises(ValueError, match="to_dense"):
        adapter(X.to_sparse())
    with pytest.raises(ValueError, match=r"shape \(0, 3, 16, 16\): expected a batch with at least one image"):
        adapter(X[:0])


def test_example_builds_at_once() -> None:
    adapter = trueup.adapt(convnet(), "tsd", example=X)
    assert adapter.net.head == "head"
    assert adapter.batches == 0
    with pytest.raises(ValueError, match="NaN"):
        trueup.adapt(convnet(), "tsd", example=X * torch.nan)


def test_params_none_updates_nothing() -> None:
    adapter = trueup.adapt(convnet(), "tsd", params="none")
    adapter(X)
    assert adapter.updates == 0
    assert adapter.state.size > 6


def test_frozen_models_are_adapted_all_the_same() -> None:
    adapter = trueup.adapt(convnet().requires_grad_(False), "tsd")
    adapter(X)
    assert adapter.updates == 1


@dataclass(frozen=True, kw_only=True)
class Exploding(GradientMethod):
    """A loss whose gradient is not finite from the third batch on."""

    info = Info(name="exploding", title="Exploding", paper="none")

    def init(self, net: SplitModel) -> nn.Module:
        state = nn.Module()
        state.register_buffer("seen", torch.zeros(1))
        return state

    def observe(self, net: SplitModel, out: Output, state: Any) -> None:
        state.seen += 1

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        zero = out.logits.sum() * 0
        return zero.abs().sqrt() if float(state.seen) > 2 else out.logits.square().mean()


def test_a_gradient_that_is_not_finite_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    adapter = trueup.adapt(convnet(), Exploding(lr=1e-3))
    adapter(X)
    adapter(X)
    before = [p.clone() for p in adapter.net.parameters()]
    with caplog.at_level(logging.WARNING, logger="trueup"):
        adapter(X)
    assert "the gradient is not finite" in caplog.text
    assert adapter.updates == 2
    assert all(torch.equal(a, b) for a, b in zip(before, adapter.net.parameters(), strict=True))
    for state in adapter.optimizer.state.values():
        assert all(v.isfinite().all() for v in state.values())


def test_rows_are_taken_in_turn() -> None:
    adapter = chatty(limit=100)
    answer = adapter(X[:10])
    assert answer.shape == (10, 6)
    assert (adapter.batches, adapter.updates) == (1, 3)
    other = chatty(limit=100)
    assert torch.equal(answer, torch.cat([other(part) for part in X[:10].split(4)]))


def test_rows_that_lead_nowhere_are_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Idle(Chatty):
        def rows(self, state: Any, n: int) -> int:
            return 0

    with pytest.raises(ValueError, match="returned 0 for 16 remaining rows"):
        trueup.adapt(convnet(), Idle())(X)


def test_a_loss_without_gradient_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    adapter = trueup.adapt(convnet(), "tsd", params="head", alignment=0.0)
    with caplog.at_level(logging.WARNING, logger="trueup"):
        adapter(X)
        adapter(X)
    assert sum("does not depend on any selected parameter" in r.message for r in caplog.records) == 1
    assert adapter.updates == 0


def test_learnt_state_joins_the_optimiser_and_teachers_do_not() -> None:
    adapter = chatty(limit=100)
    projector, teacher = adapter.state.projector.weight.clone(), adapter.state.teacher.weight.clone()
    adapter(X)
    assert not torch.equal(adapter.state.projector.weight, projector)
    assert torch.equal(adapter.state.teacher.weight, teacher)


def test_a_method_may_ask_for_a_reset() -> None:
    adapter = chatty(limit=3)
    first = adapter(X[:12])
    assert (adapter.batches, int(adapter.state.taken)) == (1, 0)
    assert torch.equal(first, adapter(X[:12]))


def test_random_views_resume_and_reset_exactly(tmp_path: Any) -> None:
    adapter = chatty(limit=100)
    torch.manual_seed(5)
    adapter(X)
    state = torch.get_rng_state()
    first = adapter(X)
    assert torch.equal(state, torch.get_rng_state())
    adapter.save(tmp_path / "s")
    other = trueup.adapt(convnet(), Chatty(limit=100))
    other.load(tmp_path / "s")
    assert torch.equal(adapter(X), other(X))
    adapter.reset()
    adapter(X)
    assert torch.equal(first, adapter(X))
    assert not torch.equal(chatty(limit=100)(X), trueup.adapt(convnet(), Chatty(limit=100), seed=1)(X))


def test_probing_leaves_random_numbers_alone() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + torch.randn_like(x))

    state = torch.get_rng_state()
    x = torch.zeros(4, 3)
    a = trueup.adapt(Noisy(), "pl", example=x)
    b = trueup.adapt(a.unwrap(), "pl")
    assert torch.equal(a(x), b(x))
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    Noisy()  # its weights are drawn by the user
    assert torch.equal(drawn, torch.get_rng_state())


def test_registering() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Named(Method):
        """No effect."""

        info = Info(name="tent", title="Another Tent", paper="none")

    with pytest.raises(ValueError, match="registered already"):
        trueup.register(Named)

    class Bare(Method):
        info = Info(name="bare", title="Bare", paper="none")

    with pytest.raises(TypeError, match="dataclass"):
        trueup.register(Bare)

    @dataclass(frozen=True, kw_only=True)
    class Nameless(Method):
        """Says nothing of itself."""

    with pytest.raises(TypeError, match="must have a description"):
        trueup.register(Nameless)
    assert trueup.list_methods()[:4] == ["source", "bn", "tent", "pl"]


@pytest.mark.parametrize(
    ("method", "hyper"), [("memo", {"views": 2}), ("rdumb", {"every": 1}), ("tent", {"episodic": True})]
)
def test_a_method_that_starts_afresh_goes_on_counting(method: str, hyper: dict[str, Any]) -> None:
    """Batches are what was answered, whatever a method makes of them: a stream is taken up at that place."""
    adapter = trueup.adapt(convnet(), method, **hyper)
    play(adapter, [images(6, seed=i, shift=1.0)[0] for i in range(3)])
    assert adapter.batches == 3
    assert adapter.updates == (18 if method == "memo" else 3)
    adapter.reset()
    assert (adapter.batches, adapter.updates) == (0, 0)


@pytest.mark.parametrize("method", ["note", "rotta", "cotta", "adacontrast"])
def test_a_method_of_one_class_refuses_labels(method: str) -> None:
    with pytest.raises(ValueError, match=f"multilabel=True: {method} needs one class per image; use tsd"):
        trueup.adapt(convnet(), method, multilabel=True, example=images(4, seed=0)[0])
