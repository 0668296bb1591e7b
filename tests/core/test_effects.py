"""A method that can change nothing in a model is refused, or said to do nothing, when its adapter is made."""

import logging
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import trueup
from trueup.testing import convnet, images

SHIFTED = images(16, seed=0, shift=1.0)[0]


def quantised(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to move these to another package
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def normalised(layer: nn.Module) -> nn.Module:
    """The toy network with another layer in the place of each BatchNorm."""
    model = convnet()
    widths = {"bn0": 16, "bn1": 24}
    kinds = {nn.GroupNorm: lambda n: nn.GroupNorm(4, n), nn.BatchNorm2d: lambda n: untracked(n)}
    for name, width in widths.items():
        setattr(model, name, kinds.get(layer, layer)(width))
    return model


def untracked(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, track_running_stats=False)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# Quantised layers


@pytest.mark.parametrize("hyper", [{"method": "tent"}, {"method": "pl", "threshold": 0.0}, {"method": "tsd"}], ids=str)
def test_quantised_models_are_refused_when_the_adapter_is_made(hyper: dict) -> None:
    model = quantised(convnet())
    with pytest.raises(ValueError, match=r"quantised layers \(head\).*before quantisation.*adapter\.unwrap\(\)"):
        trueup.adapt(model, **hyper)


def test_quantised_models_still_serve_methods_that_take_no_gradient() -> None:
    model = quantised(convnet())
    assert torch.equal(trueup.adapt(model, "source")(SHIFTED), model(SHIFTED))
    assert trueup.adapt(model, "bn")(SHIFTED).isfinite().all()


def test_a_float_head_behind_quantised_layers_can_learn() -> None:
    torch.manual_seed(0)
    body = quantised(nn.Sequential(nn.Flatten(), nn.Linear(SHIFTED[0].numel(), 8), nn.ReLU()))
    model = nn.Sequential(OrderedDict(body=body, head=nn.Linear(8, 6)))
    with pytest.raises(ValueError, match=r'params="head"'):
        trueup.adapt(model, "pl", threshold=0.0)
    adapter = trueup.adapt(model, "pl-clf", threshold=0.0, lr=0.1)
    adapter(SHIFTED)
    assert adapter.updates == 1
    assert not torch.equal(adapter.net.model.head.weight, model.head.weight)


def test_float_parts_of_quantisable_models_are_not_refused() -> None:
    """Torch keeps its float placeholders for later quantisation among the quantised layers."""
    model = nn.Sequential(OrderedDict(convnet().named_children()))
    model.add_module("add", torch.ao.nn.quantized.FloatFunctional())
    trueup.adapt(model, "tent")


# Statistics that are not there


LAYERS = [
    pytest.param(nn.GroupNorm, "it has none of these (2 × GroupNorm)", id="GroupNorm"),
    pytest.param(lambda n: nn.Identity(), "it has no normalisation layers", id="none"),
    pytest.param(
        torchvision.ops.FrozenBatchNorm2d, "it has none of these (2 × FrozenBatchNorm2d)", id="FrozenBatchNorm2d"
    ),
    pytest.param(nn.BatchNorm2d, "the batch's already (2 × BatchNorm2d)", id="untracked"),
]


@pytest.mark.parametrize(("layer", "reason"), LAYERS)
@pytest.mark.parametrize(
    "hyper", [("bn", {}), ("bn-alpha", {}), ("bn-prior", {}), ("source", {"norm": "ema"})], ids=str
)
def test_statistics_that_no_layer_can_take_are_said(
    layer: Any, reason: str, hyper: tuple[str, dict], caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing really changes: the answers are the plain model's."""
    model = normalised(layer)
    adapter = trueup.adapt(model, hyper[0], **hyper[1])
    assert torch.equal(adapter(SHIFTED), model.eval()(SHIFTED))
    adapter(SHIFTED)
    (message,) = said(caplog)
    assert message.startswith(f"{hyper[0]} changes nothing in this model")
    assert reason in message
    assert "updates parameters (tsd)" in message


def test_an_exported_module_hides_its_layers(caplog: pytest.LogCaptureFixture) -> None:
    model = convnet().eval()
    shapes = ({0: torch.export.Dim("n", min=2)},)
    exported = torch.export.export(model, (SHIFTED,), dynamic_shapes=shapes).module()
    adapter = trueup.adapt(exported, "bn")
    torch.testing.assert_close(adapter(SHIFTED), model(SHIFTED))
    (message,) = said(caplog)
    assert "exported graph cannot be reached (adapt the module that was exported)" in message


@pytest.mark.parametrize("method", ["source", "t3a", "lame", "tsd", "tent", "note"])
def test_other_methods_are_quiet(method: str, caplog: pytest.LogCaptureFixture) -> None:
    trueup.adapt(normalised(nn.GroupNorm), method)(SHIFTED)
    trueup.adapt(convnet(), method)(SHIFTED)
    assert said(caplog) == []


@pytest.mark.parametrize("method", ["bn", "bn-alpha", "bn-prior"])
def test_one_layer_that_follows_is_enough(method: str, caplog: pytest.LogCaptureFixture) -> None:
    model = convnet()
    model.bn0 = nn.GroupNorm(4, 16)
    trueup.adapt(model, method)(SHIFTED)
    assert said(caplog) == []


# Parameters that are not there


@pytest.mark.parametrize("params", ["norms", r"layer9\.", lambda name: False], ids=["keyword", "pattern", "function"])
def test_params_that_match_nothing_are_refused_when_the_adapter_is_made(params: Any) -> None:
    with pytest.raises(ValueError, match=r"nothing to update.*conv0\.weight"):
        trueup.adapt(convnet(), "tsd", params=params)


def test_a_model_without_normalisation_refuses_tent_when_the_adapter_is_made() -> None:
    with pytest.raises(ValueError, match="nothing to update"):
        trueup.adapt(nn.Linear(3, 3), "tent")


@pytest.mark.parametrize("params", ["head", "backbone"])
def test_the_head_is_looked_for_with_the_first_batch(params: str) -> None:
    adapter = trueup.adapt(convnet(), "tsd", params=params)
    adapter(SHIFTED)
    assert ("head.weight" in adapter.net.selected) == (params == "head")


# Frozen parameters


def half_frozen() -> nn.Module:
    model = convnet()
    model.conv0.requires_grad_(False)
    model.bn0.requires_grad_(False)
    return model


def test_frozen_parameters_that_are_updated_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = half_frozen()
    adapter = trueup.adapt(model, "tsd", lr=0.01)
    for _ in range(2):
        adapter(SHIFTED)
    (message,) = said(caplog)
    assert "tsd updates parameters with requires_grad=False" in message
    assert "3 of 8 (conv0.weight, bn0.weight, bn0.bias)" in message
    assert 'params="trainable"' in message
    assert not torch.equal(adapter.net.model.conv0.weight, model.conv0.weight)


def test_norms_that_are_frozen_are_said_with_another_way_out(caplog: pytest.LogCaptureFixture) -> None:
    trueup.adapt(half_frozen(), "tent")(SHIFTED)
    (message,) = said(caplog)
    assert "2 of 4 (bn0.weight, bn0.bias)" in message
    assert "regular expression" in message
    assert "trainable" not in message


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (convnet().requires_grad_(False), "all"),  # frozen for inference
        (convnet(), "all"),
        (half_frozen(), r"conv"),  # named
        (half_frozen(), "trainable"),
        (half_frozen(), "head"),
    ],
)
def test_nothing_is_said_where_it_was_meant(model: nn.Module, params: str, caplog: pytest.LogCaptureFixture) -> None:
    trueup.adapt(model, "tsd", params=params)(SHIFTED)
    assert said(caplog) == []


def test_trainable_selects_what_requires_grad_in_the_users_model() -> None:
    model = half_frozen()
    adapter = trueup.adapt(model, "tsd", params="trainable", lr=0.01)
    adapter(SHIFTED)
    assert set(adapter.net.selected) == {n for n, p in model.named_parameters() if p.requires_grad}
    moved = {name for name, p in adapter.net.model.named_parameters() if not torch.equal(p, model.get_parameter(name))}
    assert moved == set(adapter.net.selected)
    plain = adapter.unwrap()
    assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in model.parameters()]


def test_trainable_of_a_frozen_model_is_refused_when_the_adapter_is_made() -> None:
    with pytest.raises(ValueError, match=r"frozen as a whole; call requires_grad_\(True\)"):
        trueup.adapt(convnet().requires_grad_(False), "tsd", params="trainable")


def test_a_state_of_other_trainable_parameters_is_refused(tmp_path: Path) -> None:
    adapter = trueup.adapt(half_frozen(), "tsd", params="trainable")
    adapter(SHIFTED)
    adapter.save(tmp_path / "state")
    again = trueup.adapt(half_frozen(), "tsd", params="trainable")
    again.load(tmp_path / "state")
    assert torch.equal(again(SHIFTED), adapter(SHIFTED))
    with pytest.raises(ValueError, match="belongs to"):
        trueup.adapt(convnet(), "tsd", params="trainable").load(tmp_path / "state")
