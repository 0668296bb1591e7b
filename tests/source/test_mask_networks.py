"""Networks for masks by name: their shapes, whom they come from, nothing downloaded, and heads that adapters find."""

import re
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import trueup
from trueup.model.calls import as_logits
from trueup.source.architectures import SmallUNet
from trueup.source.networks import build_network, check_smp, find_network, network_code

torchvision_segmenters = torchvision.models.segmentation


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants to download something fails."""

    def fail(*_: object, **__: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    monkeypatch.setattr("segmentation_models_pytorch.encoders.hf_hub_download", fail)
    monkeypatch.setattr("socket.socket.connect", fail)


# The small U-Net


@pytest.mark.parametrize("shape", [(8, 8), (9, 8), (11, 23), (15, 15), (32, 32), (33, 50)])
@pytest.mark.parametrize("channels", [1, 3])
def test_small_unet_answers_every_pixel_of_any_size(shape: tuple[int, int], channels: int) -> None:
    assert build_network("small-unet", channels)(torch.randn(2, 3, *shape)).shape == (2, channels, *shape)


def test_small_unet_by_hand() -> None:
    """Of each pair of convolutions without bias and their BatchNorms; then the head."""

    def double(before: int, after: int) -> int:
        return 9 * (before * after + after * after) + 2 * 2 * after

    expected = double(3, 16) + double(16, 32) + double(32, 64) + double(96, 32) + double(48, 16) + 16 * 5 + 5
    assert sum(p.numel() for p in build_network("small-unet", 5).parameters()) == expected


def test_small_unet_computes_what_it_should() -> None:
    torch.manual_seed(0)
    model = build_network("small-unet", 3).eval()
    assert isinstance(model, SmallUNet)
    x = torch.randn(2, 3, 12, 20)
    high = model.enter(x)
    middle = model.down[0](F.max_pool2d(high, 2))
    low = model.down[1](F.max_pool2d(middle, 2))
    twice = low.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    middle = model.up[0](torch.cat([twice, middle], dim=1))
    twice = middle.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    expected = model.head(model.up[1](torch.cat([twice, high], dim=1)))
    assert torch.equal(model(x), expected)


def test_small_unet_starts_from_torchs_random_state() -> None:
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(build_network("small-unet", 2).state_dict()["head.weight"])
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


# segmentation_models_pytorch


@pytest.mark.parametrize(
    ("name", "kind", "encoder"),
    [
        ("smp:deeplabv3plus/mobilenet_v2", smp.DeepLabV3Plus, "MobileNetV2Encoder"),
        ("smp:unet/resnet18", smp.Unet, "ResNetEncoder"),
        ("smp:FPN", smp.FPN, "MobileNetV2Encoder"),
    ],
)
def test_smp_by_architecture_and_encoder(name: str, kind: type, encoder: str) -> None:
    model = build_network(name, 3, size=64)
    assert isinstance(model, kind)
    assert type(model.encoder).__name__ == encoder
    with torch.no_grad():
        assert model.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 3, 64, 64)
    assert network_code(name) == ""


def test_encoder_may_be_left_out() -> None:
    assert check_smp("smp:DeepLabV3Plus") == ("deeplabv3plus", "mobilenet_v2")
    assert check_smp("smp:fpn/resnet50") == ("fpn", "resnet50")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smp:unett", "no architecture 'unett'; did you mean 'unet'?"),
        ("smp:", "no architecture ''"),
        ("smp:unet/mobilnet_v2", "no encoder 'mobilnet_v2'; did you mean 'mobilenet_v2'?"),
        ("smp:unet/resnet18/3", "no encoder 'resnet18/3'"),
    ],
)
def test_unknown_names_of_smp_are_refused_before_anything_is_built(name: str, said: str) -> None:
    for ask in (find_network, lambda n: build_network(n, 3)):
        with pytest.raises(ValueError, match=re.escape(f"{name!r}: segmentation_models_pytorch has {said}")):
            ask(name)


def test_imagenet_weights_of_smp_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def create(*args: Any, **options: Any) -> nn.Module:
        asked.update(options, args=args)
        return nn.Identity()

    monkeypatch.setattr(smp, "create_model", create)
    build_network("smp:unet/resnet18", 2, weights="imagenet")
    assert asked == {"args": ("unet", "resnet18"), "classes": 2, "encoder_weights": "imagenet"}
    build_network("smp:unet/resnet18", 4)
    assert asked == {"args": ("unet", "resnet18"), "classes": 4, "encoder_weights": None}


@pytest.mark.parametrize("name", ["smp:unet/resnet18", "deeplabv3_mobilenet_v3_large"])
def test_imagenet_without_a_network(name: str) -> None:
    with pytest.raises(OSError, match=f"ImageNet weights of '{name}' could not be loaded.* a local file"):
        build_network(name, 3, weights="imagenet")


def test_library_that_is_not_installed_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(ImportError, match=r"segmentation_models_pytorch is not installed: pip install 'trueup\[seg\]'"):
        build_network("smp:unet", 3)
    assert build_network("small-unet", 3)  # needs nobody


# torchvision


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("deeplabv3_mobilenet_v3_large", torchvision_segmenters.DeepLabV3),
        ("torchvision/fcn_resnet50", torchvision_segmenters.FCN),
        ("lraspp_mobilenet_v3_large", torchvision_segmenters.LRASPP),
    ],
)
def test_segmenters_of_torchvision_come_without_weights(name: str, kind: type) -> None:
    model = build_network(name, 2, size=64)
    assert isinstance(model, kind)
    with torch.no_grad():
        answer = model.eval()(torch.randn(2, 3, 64, 64))
    assert as_logits(answer, None, rows=2).shape == (2, 2, 64, 64)


def test_backbone_alone_has_imagenet_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none for a head of other classes: the head starts anew, at once."""
    torch.manual_seed(0)
    state = torchvision.models.mobilenet_v3_large().state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: state)
    model = build_network("deeplabv3_mobilenet_v3_large", 2, weights="imagenet", size=64)
    first: Tensor = model.state_dict()["backbone.0.0.weight"]
    assert torch.equal(first, state["features.0.0.weight"])
    assert model.state_dict()["classifier.4.weight"].shape[0] == 2


def test_misspelt_segmenter_of_torchvision_finds_its_name() -> None:
    with pytest.raises(ValueError, match="no network is called 'deeplabv3_resnet5'; did you mean 'deeplabv3_resnet50'"):
        find_network("deeplabv3_resnet5")
    with pytest.raises(ValueError, match=r"no network is called 'small-net'; did you mean 'small-unet'.*smp:ARCH"):
        find_network("small-net")


# Heads


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("small-unet", "head"),
        ("smp:deeplabv3plus", "segmentation_head.0"),
        ("deeplabv3_mobilenet_v3_large", "classifier.4"),
    ],
)
def test_adapters_find_the_head(name: str, head: str, multilabel: bool) -> None:
    torch.manual_seed(0)
    model = build_network(name, 2, size=64).eval()
    adapter = trueup.adapt(model, "tsd", multilabel=multilabel)
    assert adapter(torch.randn(2, 3, 64, 64)).shape == (2, 2, 64, 64)
    assert (adapter.net.head, adapter.updates) == (head, 1)


def test_a_single_label_is_a_network_too() -> None:
    torch.manual_seed(0)
    adapter = trueup.adapt(build_network("small-unet", 1).eval(), "tsd", multilabel=True)
    assert adapter(torch.randn(2, 3, 32, 32)).shape == (2, 1, 32, 32)
    assert (adapter.net.head, adapter.updates) == ("head", 1)


# Weights from a file


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_file_fills_all_but_a_head_of_other_outputs(channels: int, tmp_path: Path) -> None:
    theirs = build_network("small-unet", 3).state_dict()
    torch.save(theirs, tmp_path / "x.pt")
    ours = build_network("small-unet", channels, weights=str(tmp_path / "x.pt"), size=32).state_dict()
    fits = [name for name in ours if channels == 3 or not name.startswith("head")]
    assert all(torch.equal(ours[name], theirs[name]) for name in fits)
    assert ours["head.weight"].shape == (channels, 16, 1, 1)
    assert 0 < float(ours["head.weight"].abs().max()) <= 16**-0.5
