"""Choosing parameters by name."""

import pytest
import torch
from torch import nn

import trueup
from trueup.model.params import select_parameters
from trueup.testing import convnet, images


class RmsNorm2(nn.Module):
    """A normalisation layer of another library."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dim, 1, 1))


class NormedLinear(nn.Linear):
    """A cosine classifier: called a norm, but it is none."""


class NormFreeBlock(nn.Module):
    """Named after what it does without."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gain = nn.Conv2d(2, 2, 1), nn.Parameter(torch.ones(()))


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2)
        self.ln, self.gn, self.rms = nn.LayerNorm((2, 3)), nn.GroupNorm(1, 2), nn.RMSNorm((2, 3))
        self.inorm, self.plain = nn.InstanceNorm2d(2, affine=True), nn.InstanceNorm2d(2)
        self.other, self.head, self.conv = RmsNorm2(2), NormedLinear(2, 2), nn.Conv2d(2, 2, 1)
        self.free = NormFreeBlock()
        self.register_parameter("count", nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False))


def test_norm_means_every_kind_of_normalisation() -> None:
    pairs = {f"{m}.{n}" for m in ("bn1", "bn2", "bn3", "ln", "gn", "inorm") for n in ("weight", "bias")}
    assert set(select_parameters(Zoo(), "norm", None)) == pairs | {"rms.weight", "other.scale"}


def test_all_is_every_floating_point_parameter_frozen_or_not() -> None:
    model = Zoo().requires_grad_(False)
    assert set(select_parameters(model, "all", None)) == {n for n, _ in model.named_parameters()} - {"count"}


def test_none_is_nothing() -> None:
    assert select_parameters(Zoo(), "none", None) == {}


def test_head_and_backbone() -> None:
    assert set(select_parameters(Zoo(), "head", "head")) == {"head.weight", "head.bias"}
    both = {**select_parameters(Zoo(), "head", "head"), **select_parameters(Zoo(), "backbone", "head")}
    assert set(both) == set(select_parameters(Zoo(), "all", None))
    with pytest.raises(ValueError, match="head="):
        select_parameters(Zoo(), "backbone", None)


def test_regular_expression_and_function() -> None:
    assert set(select_parameters(Zoo(), r"^bn[12]\.w", None)) == {"bn1.weight", "bn2.weight"}
    assert set(select_parameters(Zoo(), lambda name: name.startswith("conv"), None)) == {"conv.weight", "conv.bias"}


@pytest.mark.parametrize("params", ["norms", r"layer9", lambda name: False])
def test_nothing_to_update_is_loud(params: object) -> None:
    with pytest.raises(ValueError, match=r"nothing to update.*bn1\.weight.*none, norm, head, backbone, all"):
        select_parameters(Zoo(), params, None)


def test_an_invalid_expression_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="regular expression"):
        trueup.adapt(convnet(), "tent", params="(", example=images(2, seed=0)[0])


def test_a_tied_head_is_named_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    assert set(select_parameters(model, "head", "2")) == {"0.weight", "2.bias"}


def test_a_model_without_normalisation_refuses_tent() -> None:
    with pytest.raises(ValueError, match="nothing to update"):
        trueup.adapt(nn.Linear(3, 3), "tent")(torch.randn(4, 3))
