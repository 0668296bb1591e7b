"""Networks by name: their shapes and sizes, and what of a file of weights they take."""

import re
import sys
from pathlib import Path
from urllib.error import URLError

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from trueup.model.heads import find_head
from trueup.source.networks import build_network


def same(model: nn.Module, state: dict[str, Tensor], without: str = "-") -> bool:
    return all(torch.equal(t, state[n].to(t.dtype)) for n, t in model.state_dict().items() if not n.startswith(without))


def test_resnet26_by_hand() -> None:
    """Convolutions, then scale and shift of each BatchNorm, then the head."""
    stem = 3 * 16 * 9
    first = 8 * 16 * 16 * 9 + 8 * 2 * 16
    second = 16 * 32 * 9 + 7 * 32 * 32 * 9 + 2 * 16 + 7 * 2 * 32
    third = 32 * 64 * 9 + 7 * 64 * 64 * 9 + 2 * 32 + 7 * 2 * 64
    end = 2 * 64 + 64 * 10 + 10
    model = build_network("resnet26-cifar", 10)
    parts = [model.conv1, model.layer1, model.layer2, model.layer3]
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [stem, first, second, third]
    assert sum(p.numel() for p in model.parameters()) == stem + first + second + third + end == 366_938
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 25  # and the head makes 26
    for layer in convolutions:  # kaiming, by fan out: within five standard errors
        want, count = (2 / (9 * layer.out_channels)) ** 0.5, layer.weight.numel()
        assert abs(layer.weight.std().item() / want - 1) < 5 / (2 * count) ** 0.5


def test_resnet26_computes_what_it_should() -> None:
    """Each block written out once more; the 8x8 pooling of the original at 32x32."""
    torch.manual_seed(0)
    model, x = build_network("resnet26-cifar", 10).double().eval(), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.running_mean)
    out, widths = model.conv1(x), []
    for block in [*model.layer1, *model.layer2, *model.layer3]:
        side = block.conv1(block.bn1(out).relu())
        side = block.conv2(block.bn2(side).relu())
        if side.shape != out.shape:
            small = (out[..., ::2, ::2] + out[..., 1::2, ::2] + out[..., ::2, 1::2] + out[..., 1::2, 1::2]) / 4
            out = torch.cat([small, torch.zeros_like(small)], dim=1)
        out = out + side
        widths.append(tuple(out.shape[1:]))
    assert widths == [(16, 32, 32)] * 4 + [(32, 16, 16)] * 4 + [(64, 8, 8)] * 4
    want = model.fc(nn.functional.avg_pool2d(model.bn(out).relu(), 8).flatten(1))
    assert torch.allclose(model(x), want, rtol=1e-12, atol=1e-12)


def test_digits_net_by_hand() -> None:
    model = build_network("digits-net", 10)
    convolutions = 9 * (3 * 32 + 32 * 64 + 64 * 128 + 128 * 128)
    assert sum(p.numel() for p in model.parameters()) == convolutions + 2 * (32 + 64 + 128 + 128) + 128 * 10 + 10
    assert model.body(torch.randn(2, 3, 32, 32)).shape == (2, 128, 4, 4)
    assert find_head(model.eval(), torch.randn(2, 3, 8, 8))[0] == "head"


@pytest.mark.parametrize("name", ["resnet26-cifar", "digits-net"])
@pytest.mark.parametrize("size", [8, 9, 11, 32, 47])
def test_own_networks_take_any_size(name: str, size: int) -> None:
    assert build_network(name, 3)(torch.randn(2, 3, size, size)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        ("resnet18", 64, torchvision.models.ResNet),
        ("torchvision/resnet18", 64, torchvision.models.ResNet),
        ("timm/resnet18", 64, timm.models.ResNet),
        ("vit_b_32", 64, torchvision.models.VisionTransformer),
        ("vit_b_32", 224, torchvision.models.VisionTransformer),
        ("efficientnet_b0", 64, torchvision.models.EfficientNet),
        ("mixer_s32_224", 64, timm.models.mlp_mixer.MlpMixer),
        ("mixer_s32_224", 224, timm.models.mlp_mixer.MlpMixer),
        ("timm/vit_tiny_patch16_224.augreg_in21k", 64, timm.models.VisionTransformer),
    ],
)
def test_library_networks(name: str, size: int, kind: type) -> None:
    model = build_network(name, 5, size=size)
    assert isinstance(model, kind)
    assert model.training
    with torch.no_grad():
        assert model.eval()(torch.randn(1, 3, size, size)).shape == (1, 5)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resnt50", "resnet50"),
        ("digit-net", "digits-net"),
        ("mixer_l16_24", "mixer_l16_224"),
        ("timm/mixer_l16_24", "timm/mixer_l16_224"),
        ("torchvision/vit_b16", "torchvision/vit_b_16"),
        ("torchvision/mixer_l16_224", None),
        ("mixer_l16_224.nonsense", "mixer_l16_224"),
        ("nothing/like/it", None),
    ],
)
def test_unknown_names(name: str, near: str | None) -> None:
    hint = f"; did you mean {near!r}?" if near else ""
    with pytest.raises(ValueError, match=re.escape(f"no network is called {name!r}{hint}")):
        build_network(name, 5)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least one output, not 0"):
        build_network("digits-net", 0)
    with pytest.raises(ValueError, match='weights=\'imagnet\' must be "none", "imagenet"'):
        build_network("digits-net", 5, weights="imagnet")


# Files of weights


def test_file_with_the_same_classes_loads_all(tmp_path: Path) -> None:
    state = build_network("digits-net", 5).state_dict()
    save_file(state, tmp_path / "x.safetensors")
    torch.save({"state_dict": {f"module.{n}": t for n, t in state.items()}, "epoch": 3}, tmp_path / "x.pt")
    torch.save({"model": state}, tmp_path / "x.pth")
    for file in ("x.safetensors", "x.pt", "x.pth"):
        assert same(build_network("digits-net", 5, weights=str(tmp_path / file), size=32), state)


@pytest.mark.parametrize(("name", "head"), [("digits-net", "head"), ("timm/mixer_s32_224", "head")])
def test_file_with_other_classes_loads_all_but_the_head(name: str, head: str, tmp_path: Path) -> None:
    """timm's mixer starts with a head of zeros; ours is torch's own start, and hangs on the seed alone."""
    state = build_network(name, 7, size=64).state_dict()
    save_file(state, tmp_path / "x.safetensors")
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(build_network(name, 5, weights=str(tmp_path / "x.safetensors"), size=64))
    a, b, c = (model.get_submodule(head) for model in models)
    assert same(models[0], state, without=head)
    assert a.weight.shape[0] == 5
    assert torch.equal(a.weight, b.weight)
    assert not torch.equal(a.weight, c.weight)
    bound = a.in_features**-0.5
    assert 0.9 * bound < a.weight.abs().max() <= bound
    assert 0 < a.bias.abs().max() <= bound
    assert models[0].training


def test_probing_leaves_the_random_state_alone(tmp_path: Path) -> None:
    """The new head is drawn right after the network's own start: as if no file had been read."""
    save_file(build_network("digits-net", 7).state_dict(), tmp_path / "x.safetensors")
    torch.manual_seed(3)
    model = build_network("digits-net", 5, weights=str(tmp_path / "x.safetensors"), size=32)
    torch.manual_seed(3)
    head = build_network("digits-net", 5).head
    head.reset_parameters()
    assert torch.equal(model.head.weight, head.weight)


def test_file_without_a_head_or_counts(tmp_path: Path) -> None:
    state = {n: t for n, t in build_network("digits-net", 5).state_dict().items() if not n.startswith("head")}
    torch.save({n: t for n, t in state.items() if not n.endswith("num_batches_tracked")}, tmp_path / "x.pt")
    assert same(build_network("digits-net", 5, weights=str(tmp_path / "x.pt"), size=32), state, without="head")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("classes", [5, 7])
def test_other_precision_becomes_float32(dtype: torch.dtype, classes: int, tmp_path: Path) -> None:
    state = build_network("digits-net", classes).to(dtype).state_dict()
    save_file(state, tmp_path / "x.safetensors")
    model = build_network("digits-net", 5, weights=str(tmp_path / "x.safetensors"), size=32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert same(model, state, without="-" if classes == 5 else "head")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("body.1.running_mean"), "body.1.running_mean is missing$"),
        (lambda s: s.update(extra=torch.ones(2)), "extra is unexpected$"),
        (lambda s: s.update({"body.0.weight": torch.ones(24, 1, 3, 3)}), r"body.0.weight is \(24, 1, 3, 3\)"),
        (
            lambda s: s.update({"body.1.bias": torch.ones(32).int()}),
            r"body.1.bias is \(32,\) torch.int32, not \(32,\)$",
        ),
        (lambda s: s.pop("head.bias"), "head.bias is missing$"),
        (lambda s: s.update({f"x{i}": torch.ones(2) for i in range(9)}), "(x[0-4] is unexpected; ){5}and 4 more$"),
    ],
)
def test_files_that_do_not_fit(change, said: str, tmp_path: Path) -> None:
    state = dict(build_network("digits-net", 5).state_dict())
    change(state)
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=rf"x.pt does not fit the model: {said}"):
        build_network("digits-net", 5, weights=str(tmp_path / "x.pt"), size=32)


def test_weights_of_another_network(tmp_path: Path) -> None:
    torch.save(build_network("resnet26-cifar", 5).state_dict(), tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"body.0.weight is missing; conv1.weight is unexpected; .* and \d+ more$"):
        build_network("digits-net", 5, weights=str(tmp_path / "x.pt"), size=32)


@pytest.mark.parametrize("file", ["x.pt", "x.safetensors"])
def test_damaged_files(file: str, tmp_path: Path) -> None:
    state = build_network("digits-net", 5).state_dict()
    save_file(state, tmp_path / file) if file.endswith("safetensors") else torch.save(state, tmp_path / file)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:5000])
    with pytest.raises(ValueError, match="or was cut off"):
        build_network("digits-net", 5, weights=str(tmp_path / file))


# ImageNet's weights


def test_imagenet_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The download gives a made-up state dict: the rest is the library's own way."""
    torch.manual_seed(0)
    state = torchvision.models.resnet18().state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: state)
    assert same(build_network("resnet18", 1000, weights="imagenet", size=32), state)
    model = build_network("resnet18", 5, weights="imagenet", size=32)
    assert same(model, state, without="fc")
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)
    assert model.fc.out_features == 5
    assert 0 < model.fc.weight.abs().max() <= 512**-0.5


def test_imagenet_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of another number of classes than 1000 is replaced for 1000, too."""
    state = timm.create_model("vit_tiny_patch16_224", num_classes=21843).state_dict()
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(state))
    for classes in (21843, 1000, 5):
        model = build_network("vit_tiny_patch16_224.augreg_in21k", classes, weights="imagenet")
        assert same(model, state, without="-" if classes == 21843 else "head")
        assert model.head.weight.shape == (classes, 192)
        assert model.num_classes == classes


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("resnet18", "torchvision.models._api.load_state_dict_from_url"),
        ("vit_tiny_patch16_224", "timm.models._builder.load_state_dict_from_hf"),
    ],
)
def test_imagenet_without_a_network(name: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(function, fail)
    with pytest.raises(OSError, match=f"ImageNet weights of '{name}' could not be .* no route to host.* a local file"):
        build_network(name, 5, weights="imagenet")


def test_own_networks_have_no_imagenet_weights() -> None:
    with pytest.raises(ValueError, match="'digits-net' has no ImageNet weights; give a file of weights"):
        build_network("digits-net", 5, weights="imagenet")


# A user's own


MINE = """
import torch

def net(classes):
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, classes))

def nothing(classes):
    return classes

def broken(classes):
    raise ValueError("mine to see")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of its own name for each test, in a package in the current folder."""
    package = f"package_{tmp_path.name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "mine.py").write_text(MINE)
    (tmp_path / package / "hungry.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    return package


def test_factory(folder: str) -> None:
    before = list(sys.path)
    model = build_network(f"{folder}.mine:net", 4)
    assert sys.path == before
    assert model(torch.randn(2, 3, 5, 5)).shape == (2, 4)
    save_file(model.state_dict(), "x.safetensors")
    assert same(build_network(f"{folder}.mine:net", 4, weights="x.safetensors"), model.state_dict())
    assert build_network(f"{folder}.mine:net", 6, weights="x.safetensors", size=8)[2].weight.shape == (6, 3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}.mine:nets", "has no function 'nets'; did you mean 'net'"),
        ("{}.nowhere:net", "there is no module"),
        ("nowhere_at_all.mine:net", "there is no module"),
        ("{}.mine:nothing", "returned int, not a torch.nn.Module"),
        ("{}.mine:broken", "mine to see"),
        (":net", "not of the form"),
        (".mine:net", "not of the form"),
        ("{}.mine:", "not of the form"),
    ],
)
def test_factories_that_fail(name: str, said: str, folder: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_network(name.format(folder), 4)


def test_factory_whose_module_lacks_another(folder: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        build_network(f"{folder}.hungry:net", 4)
