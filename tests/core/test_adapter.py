"""The adapter's own behaviour, beyond the contract of methods."""

import copy
import logging
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import trueup
from trueup import GradientMethod, Info, Method, Output, SplitModel
from trueup.testing import convnet, images, patchnet

X = images(16, seed=0, shift=1.0)[0]


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
    with pytest.raises(ValueError, match="seed='a' must be a whole number"):
        trueup.adapt(convnet(), "tent", seed="a")


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


def test_a_failed_call_does_not_move_the_random_stream() -> None:
    a, b = chatty(limit=100), chatty(limit=100)
    with pytest.raises(ValueError, match="cannot take"):
        a(X[:, :2])
    assert torch.equal(a(X), b(X))


def test_losses_and_memory_stay_exact_under_autocast() -> None:
    """Only the model runs in low precision; what a method multiplies is not rounded to it."""
    seen: list[torch.dtype] = []

    @dataclass(frozen=True, kw_only=True)
    class Spy(Chatty):
        def observe(self, net: SplitModel, out: Output, state: Any) -> None:
            seen.append((out.features @ out.features.T).dtype)

        def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
            seen.append((out.logits @ out.logits.T).dtype)
            return super().loss(net, out, state)

        def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
            seen.append((out.scores @ out.scores.T).dtype)
            return out.logits

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert trueup.adapt(convnet(), Spy())(X[:4]).dtype == torch.float32
    assert seen == [torch.float32] * 3


def test_weights_reach_the_model_inside_one_autocast() -> None:
    """Autocast keeps low-precision copies of weights; a step, a reset and a load must not leave them behind."""
    inside, outside = (trueup.adapt(convnet(), "pl", lr=0.1, norm="source", threshold=0.0, steps=2) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [inside(X), inside(X)]
        inside.reset()
        found.append(inside(X))
    expected = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected.append(outside(X))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], found[0])


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


def test_the_head_of_a_half_precision_model_takes_its_features() -> None:
    adapter = trueup.adapt(patchnet().bfloat16(), "tsd", example=X.bfloat16())
    out = adapter.net(X.bfloat16())
    torch.testing.assert_close(adapter.net.classify(out.features), out.scores)


def test_hooks_of_a_method_see_the_statistics() -> None:
    """Also after a backward that recomputes: a teacher cloned there must not lose them."""
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Cloning(Chatty):
        def after(self, net: SplitModel, out: Output, state: Any) -> None:
            seen.append(all(b is not None for m in net.modules() for b in m._buffers.values()))

    trueup.adapt(Checkpointed(False), Cloning())(X)
    assert seen == [True] * 4


def test_moving_keeps_the_precision_of_the_memory(tmp_path: Any) -> None:
    adapter = trueup.adapt(convnet(), "tsd")
    adapter(X)
    adapter.to(torch.float32)
    assert adapter.state.sums.dtype == torch.float64
    adapter.save(tmp_path / "state")
    trueup.adapt(convnet(), "tsd").load(tmp_path / "state")
    features, sums = adapter.state.features.clone(), adapter.state.sums.clone()
    adapter.bfloat16()
    assert torch.equal(adapter.state.features, features)
    assert torch.equal(adapter.state.sums, sums)
    adapter.reset()
    assert next(adapter.net.parameters()).dtype == torch.bfloat16
    assert adapter(X.bfloat16()).isfinite().all()


def test_repr_before_and_after_the_first_batch() -> None:
    adapter = trueup.adapt(convnet(), "tent")
    assert repr(adapter).endswith("waiting for its first batch")
    adapter(X)
    assert repr(adapter).endswith("updates 80 of 4.1k values, head 'head'")
    assert repr(adapter).startswith("Tent(lr=0.001, params='norm', steps=1, norm='batch', episodic=False)")


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
    for state in adapter._optimizer.state.values():
        assert all(v.isfinite().all() for v in state.values())


@dataclass(frozen=True, kw_only=True)
class Chatty(GradientMethod):
    """Uses every hook: random views, learnt parameters, a teacher, rows one at a time, a reset by itself."""

    lr: float = 1e-2
    limit: int = 3

    info = Info(name="chatty", title="Chatty", paper="none", needs=("head",))

    def init(self, net: SplitModel) -> nn.Module:
        state = nn.Module()
        state.projector = nn.Linear(net.weight.shape[1], 2)
        state.teacher = net.clone()
        state.register_buffer("taken", torch.zeros(1, dtype=torch.int64))
        return state

    def rows(self, state: Any, n: int) -> int:
        return min(n, 4)

    def forward(self, net: SplitModel, x: Tensor, state: Any) -> Output:
        out = net(x + 0.1 * torch.randn_like(x), update=True)
        out.memo["target"] = state.teacher(x).logits.softmax(dim=1)
        return out

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        fit = -(out.memo["target"] * out.logits.log_softmax(dim=1)).sum(dim=1).mean()
        return fit + state.projector(out.features).square().mean()

    def after(self, net: SplitModel, out: Output, state: Any) -> Any:
        state.taken += 1
        return "reset" if int(state.taken) == self.limit else None


def chatty(**hyper: Any) -> trueup.Adapter:
    return trueup.adapt(convnet(), Chatty(**hyper), example=X)


def test_rows_are_taken_in_turn() -> None:
    adapter = chatty(limit=100)
    answer = adapter(X[:10])
    assert answer.shape == (10, 6)
    assert (adapter.batches, adapter.updates) == (3, 3)
    other = chatty(limit=100)
    assert torch.equal(answer, torch.cat([other(part) for part in X[:10].split(4)]))


def test_rows_that_lead_nowhere_are_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Idle(Chatty):
        def rows(self, state: Any, n: int) -> int:
            return 0

    with pytest.raises(ValueError, match="took 0 of 16 waiting rows"):
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
    assert (adapter.batches, int(adapter.state.taken)) == (0, 0)
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


def test_moving_keeps_all_parts_together() -> None:
    """Device moves need hardware; a change of dtype goes the same way through model, memory and optimiser."""
    adapter = trueup.adapt(convnet(), "tsd", lr=1e-3)
    adapter(X)
    adapter.double()
    assert adapter(X.double()).dtype == torch.float64
    assert adapter._fresh[0].features.dtype == torch.float64
    assert all(v.dtype == torch.float64 for s in adapter._optimizer.state.values() for k, v in s.items() if k != "step")
    adapter.reset()
    assert adapter(X.double()).isfinite().all()


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


def test_large_half_precision_features_are_not_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).half()
    model[0].weight.data.fill_(100.0)
    assert trueup.adapt(model, "t3a")(torch.full((2, 4), 2.0).half()).isfinite().all()


def test_teachers_move_with_the_model_and_memory_does_not_lose() -> None:
    adapter = chatty(limit=100).bfloat16()
    assert next(adapter.state.teacher.parameters()).dtype == torch.bfloat16
    assert adapter.state.projector.weight.dtype == torch.float32
    assert adapter(X.bfloat16()).isfinite().all()
    adapter.double()
    assert adapter(X.double()).dtype == torch.float64


def test_autocast_is_left_to_the_user() -> None:
    adapter = trueup.adapt(patchnet(), "tsd")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert adapter(X).isfinite().all()
    assert adapter.state.features.dtype == torch.float32
    assert adapter.updates == 1


def test_half_precision_model() -> None:
    adapter = trueup.adapt(patchnet().bfloat16(), "tsd")
    answer = adapter(X.bfloat16())
    assert answer.dtype == torch.float32
    assert adapter.state.features.dtype == torch.float32
    assert all(p.isfinite().all() for p in adapter.net.parameters())


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

    with pytest.raises(TypeError, match="must say what it is"):
        trueup.register(Nameless)
    assert trueup.list_methods()[:4] == ["source", "bn", "tent", "pl"]
