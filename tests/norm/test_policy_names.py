"""Policies of normalisation with a number of their own, against layers written out by hand."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.norm import NUMBERS, parse_norm
from trueup.norm.instance import RATE
from trueup.testing import convnet, images

X = images(6, seed=3, shift=1.0)[0].double()


def layer(channels: int = 3) -> nn.Sequential:
    """One BatchNorm layer with statistics and weights of its own, and a head."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(channels, dtype=torch.float64)
    for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
        assert tensor is not None
        tensor.copy_(torch.randn(channels))
    assert norm.running_var is not None
    norm.running_var.copy_(torch.rand(channels) + 0.5)
    head = nn.Linear(channels, 4, dtype=torch.float64)
    return nn.Sequential(norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()


def by_hand(model: nn.Sequential, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    norm: Any = model[0]
    shape = (-1, x.shape[1], 1, 1)
    y = (x - mean.reshape(shape)) / (variance.reshape(shape) + norm.eps).sqrt()
    y = y * norm.weight.reshape(1, -1, 1, 1) + norm.bias.reshape(1, -1, 1, 1)
    answer: Tensor = model[1:](y).detach()
    return answer


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    each = x.transpose(0, 1).flatten(1)
    return each.mean(dim=1), each.var(dim=1, correction=0)


@pytest.mark.parametrize(
    ("norm", "part"), [("mix", 0.1), ("mix:0.3", 0.3), ("prior", 6 / 22), ("prior:2", 6 / 8), ("ema:0.05", 0.05)]
)
def test_mixtures_of_the_sources_moments_and_the_batchs(norm: str, part: float) -> None:
    model = layer()
    source: Any = model[0]
    mean, variance = moments(X)
    first = source.running_mean.lerp(mean, part), source.running_var.lerp(variance, part)
    adapter = trueup.adapt(model, "source", norm=norm)
    assert torch.allclose(adapter(X), by_hand(model, X, *first), atol=1e-10)
    kept: Any = adapter.unwrap()[0]  # type: ignore[index]
    assert torch.allclose(kept.running_mean, first[0])
    assert torch.allclose(kept.running_var, first[1])
    if not norm.startswith("ema"):  # the layer itself is as it was
        assert torch.equal(adapter.net.model.get_buffer("0.running_mean"), source.running_mean)


def soft(value: Tensor, by: Tensor) -> Tensor:
    return torch.where(value > by, value - by, torch.where(value < -by, value + by, torch.zeros_like(value)))


@pytest.mark.parametrize("reach", [0.0, 0.5, 4.0])
def test_an_image_far_from_the_estimates_keeps_its_own_moments(reach: float) -> None:
    model = layer()
    source: Any = model[0]
    rows = []
    for x in X:
        flat = x.flatten(1)
        pixels = flat.shape[1]
        own, spread = flat.mean(dim=1), flat.var(dim=1, correction=1)
        scatter = ((source.running_var + source.eps) / pixels).sqrt()
        mean = source.running_mean + soft(own - source.running_mean, reach * scatter)
        wide = (source.running_var + source.eps) * (2 / (pixels - 1)) ** 0.5
        variance = (source.running_var + soft(spread - source.running_var, reach * wide)).clamp(min=0)
        rows.append(by_hand(model, x[None], mean, variance))
    adapter = trueup.adapt(model, "source", norm=f"instance:{reach}")
    assert torch.allclose(adapter.net(X, update=False).logits, torch.cat(rows), atol=1e-10)


@pytest.mark.parametrize("centred", [False, True])
def test_estimates_move_to_the_batchs_moments_which_training_stands_around(centred: bool) -> None:
    model = layer()
    source: Any = model[0]
    before = source.running_mean.clone(), source.running_var.clone()
    adapter = trueup.adapt(model, "source", norm="instance:1e6", example=X)  # so far out that nothing is corrected
    mean, variance = X.transpose(0, 1).flatten(1).mean(dim=1), X.transpose(0, 1).flatten(1).var(dim=1, correction=1)
    middle = (mean, variance) if centred else before
    with adapter.net.centred() if centred else nullcontext():
        assert torch.allclose(adapter(X), by_hand(model, X, *middle), atol=1e-10)
    kept: Any = adapter.unwrap()[0]  # type: ignore[index]
    assert torch.allclose(kept.running_mean, before[0].lerp(mean, RATE))
    assert torch.allclose(kept.running_var, before[1].lerp(variance, RATE))


def test_what_runs_without_gradient_does_not_need_it_and_what_learns_has_it() -> None:
    adapter = trueup.adapt(convnet(), "tent", norm="instance")
    before = {name: p.detach().clone() for name, p in adapter.net.model.named_parameters()}
    adapter(images(16, seed=0, shift=1.0)[0])
    changed = [name for name, p in adapter.net.model.named_parameters() if not torch.equal(p, before[name])]
    assert changed == list(adapter.net.selected)


@pytest.mark.parametrize("norm", ["mix", "prior", "instance", "ema:0.02"])
@pytest.mark.parametrize("method", ["source", "tent", "tsd", "t3a", "lame"])
def test_any_method_goes_with_any_policy_and_starts_afresh_to_the_bit(method: str, norm: str) -> None:
    xs = [images(16, seed=i, shift=1.0)[0] for i in range(4)]
    adapter = trueup.adapt(convnet(), method, norm=norm)
    first = [adapter(x) for x in xs]
    adapter.reset()
    assert all(torch.equal(a, adapter(x)) for a, x in zip(first, xs, strict=True))
    assert all(answer.isfinite().all() for answer in first)


@pytest.mark.parametrize("norm", ["mean", "batch:2", "mix:2", "ema:-1", "prior:x", "instance:nan", "", 3])
def test_a_policy_that_is_none_is_refused(norm: Any) -> None:
    with pytest.raises(ValueError, match="norm="):
        trueup.adapt(convnet(), "bn", norm=norm)


def test_numbers_that_policies_have() -> None:
    assert {name: parse_norm(name) for name in NUMBERS} == {name: (name, value) for name, value in NUMBERS.items()}
    assert parse_norm("mix:0.25") == ("mix", 0.25)


def test_single_images_keep_the_sources_middle() -> None:
    """One image's own moments are no middle: with a wide reach the answers are the source's."""
    x = images(12, seed=3)[0]
    plain, instance = trueup.adapt(convnet(), "source"), trueup.adapt(convnet(), "source", norm="instance:1e6")
    assert torch.allclose(plain(x[:1]), instance(x[:1]), atol=1e-5)
