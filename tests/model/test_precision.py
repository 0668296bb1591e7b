"""Low and high precision: autocast, half-precision models, moves between dtypes."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from chatty import Chatty, X, chatty
from torch import Tensor, nn

import trueup
from trueup import Output, SplitModel
from trueup.testing import convnet, images, patchnet


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


def test_autocast_is_left_to_the_user() -> None:
    adapter = trueup.adapt(patchnet(), "tsd")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert adapter(X).isfinite().all()
    assert adapter.state.features.dtype == torch.float32
    assert adapter.updates == 1


def test_half_precision_model() -> None:
    adapter = trueup.adapt(patchnet().bfloat16(), "t3a")
    answer = adapter(X.bfloat16())
    assert answer.dtype == torch.float32
    assert adapter.state.features.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")], ids=str)
@pytest.mark.parametrize(
    "hyper", [{"method": "tent"}, {"method": "tsd"}, {"method": "shot-im", "params": "backbone"}], ids=str
)
def test_weights_of_16_bits_are_not_updated(hyper: dict[str, Any], dtype: torch.dtype, kind: str) -> None:
    """In bfloat16 half of Tent's steps of 1e-3 round to nothing; the way out learns as a float32 model does."""
    gamma = torch.ones(1, dtype=dtype)
    assert torch.equal(gamma + 1e-3 * torch.tensor([0.4], dtype=dtype), gamma)
    model = convnet().to(dtype)
    with pytest.raises(ValueError, match=rf'model\.float\(\); with precision="{kind}"'):
        trueup.adapt(model, **hyper, example=X.to(dtype))
    adapter = trueup.adapt(model.float(), **hyper, precision="bf16")
    before = {name: p.clone() for name, p in adapter.net.model.named_parameters()}
    adapter(X)
    assert adapter.updates == 1
    for name, p in adapter.net.selected.items():
        assert not torch.equal(p, before[name]), name


def test_an_adapter_that_learns_is_not_moved_to_16_bits() -> None:
    adapter = trueup.adapt(convnet(), "tent", example=X)
    expected = copy.deepcopy(adapter)(X)
    with pytest.raises(ValueError, match="16-bit weights"):
        adapter.half()
    assert torch.equal(adapter(X), expected)
    late = trueup.adapt(convnet(), "tent").bfloat16()  # nothing is selected yet
    with pytest.raises(ValueError, match="16-bit weights"):
        late(X.bfloat16())


def test_large_half_precision_features_are_not_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).half()
    model[0].weight.data.fill_(100.0)
    assert trueup.adapt(model, "t3a")(torch.full((2, 4), 2.0).half()).isfinite().all()


def test_the_head_of_a_half_precision_model_takes_its_features() -> None:
    adapter = trueup.adapt(patchnet().bfloat16(), "t3a", example=X.bfloat16())
    out = adapter.net(X.bfloat16())
    torch.testing.assert_close(adapter.net.classify(out.features), out.scores)


def test_moving_keeps_all_parts_together() -> None:
    """Device moves need hardware; a change of dtype goes the same way through model, memory and optimiser."""
    adapter = trueup.adapt(convnet(), "tsd", lr=1e-3)
    adapter(X)
    adapter.double()
    assert adapter(X.double()).dtype == torch.float64
    assert adapter.fresh.memory.features.dtype == torch.float64
    assert all(v.dtype == torch.float64 for s in adapter.optimizer.state.values() for k, v in s.items() if k != "step")
    adapter.reset()
    assert adapter(X.double()).isfinite().all()


def test_estimates_of_a_policy_are_not_lowered_with_the_model(tmp_path: Path) -> None:
    """A state saved after `half()` fits an adapter of the half model."""
    x = images(32, seed=0, shift=1.0)[0]
    adapter = trueup.adapt(convnet(), "bn", norm="robust")
    adapter(x)
    adapter.half()
    assert {t.dtype for t in adapter.net.policy.buffers()} == {torch.float32}
    adapter(x.half())
    adapter.save(tmp_path / "half.safetensors")
    trueup.adapt(convnet().half(), "bn", norm="robust").load(tmp_path / "half.safetensors")


def test_the_frozen_source_runs_in_the_precision_of_the_adapter() -> None:
    answer = trueup.adapt(convnet(), "source", precision="bf16").answer(X)
    assert torch.equal(answer.adapted, answer.source)


def test_moving_keeps_the_precision_of_the_memory(tmp_path: Any) -> None:
    adapter = trueup.adapt(convnet(), "tsd")
    adapter(X)
    adapter.to(torch.float32)
    assert adapter.state.sums.dtype == torch.float64
    adapter.save(tmp_path / "state")
    trueup.adapt(convnet(), "tsd").load(tmp_path / "state")
    adapter = trueup.adapt(convnet(), "t3a")
    adapter(X)
    features, sums = adapter.state.features.clone(), adapter.state.sums.clone()
    adapter.bfloat16()
    assert torch.equal(adapter.state.features, features)
    assert torch.equal(adapter.state.sums, sums)
    adapter.reset()
    assert next(adapter.net.parameters()).dtype == torch.bfloat16
    assert adapter(X.bfloat16()).isfinite().all()


def test_teachers_move_with_the_model_and_memory_does_not_lose() -> None:
    adapter = chatty(limit=100, params="none").bfloat16()
    assert next(adapter.state.teacher.parameters()).dtype == torch.bfloat16
    assert adapter.state.projector.weight.dtype == torch.float32
    assert adapter(X.bfloat16()).isfinite().all()
    adapter.double()
    assert adapter(X.double()).dtype == torch.float64
