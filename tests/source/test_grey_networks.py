"""Networks of one channel by name, and recipes that say what networks see."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trueup.source.checkpoints import Store, load_model
from trueup.source.networks import build_network
from trueup.source.recipe import GivenModel, Recipe, Training

NAMES = ["digits-net", "resnet26-cifar", "small-unet", "timm/resnet18", "smp:unet/resnet18"]


@pytest.mark.parametrize("name", NAMES)
def test_a_network_by_its_name_takes_one_channel(name: str) -> None:
    model = build_network(name, 4, size=32, channels=1).eval()
    assert model(torch.randn(2, 1, 32, 32)).shape[:2] == (2, 4)


def test_networks_of_torchvision_have_three() -> None:
    with pytest.raises(ValueError, match=r"torchvision's resnet18 takes three channels, not 1: use one of timm"):
        build_network("torchvision/resnet18", 4, channels=1)


def test_a_head_of_other_classes_starts_anew_in_grey(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(build_network("digits-net", 4, channels=1).state_dict(), file)
    assert build_network("digits-net", 7, weights=str(file), size=16, channels=1).head.out_features == 7
    assert load_model(file, "digits-net", 4, 16, 1)(torch.zeros(2, 1, 16, 16)).shape == (2, 4)


def recipe(**training: Any) -> Recipe:
    return Recipe(dataset="folder", sources=("a",), classes=3, network="digits-net", training=Training(**training))


def test_names_say_what_networks_see() -> None:
    usual = recipe()
    assert {"grey", "mean"}.isdisjoint(usual.model_dump(mode="json")["training"])
    assert recipe(normalize=[[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).name == usual.name
    names = [usual.name] + [
        recipe(**seen).name for seen in ({"grey": True}, {"normalize": [0.1, 0.2]}, {"normalize": [0.1, 0.3]})
    ]
    assert len(set(names)) == 4
    again = Recipe(**recipe(normalize=[0.1, 0.2], grey=True).model_dump(mode="json"))
    assert again == recipe(normalize=[0.1, 0.2], grey=True)
    assert {"grey"}.isdisjoint(GivenModel(checkpoint="x").model_dump())


def test_a_checkpoint_of_one_channel_comes_back(tmp_path: Path) -> None:
    grey, store = recipe(grey=True, size=16), Store(tmp_path)
    model = build_network("digits-net", 3, size=16, channels=1).eval()
    store.save(grey, model, {"kept": {}})
    x = torch.randn(2, 1, 16, 16)
    assert torch.equal(store.load(grey)[0](x), model(x))
