"""Networks of public libraries with random weights: the head is found, steps work, and the page says so."""

import copy
import warnings
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import zoo
from torch import Tensor, nn

import trueup
from trueup.model.heads import HeadNotFoundError

# Library, name, head, and options that make a large network small; the input is as small as it allows.
CASES = [
    ("torchvision", "resnet18", "fc", {}),
    ("torchvision", "resnet50", "fc", {}),
    ("torchvision", "resnext50_32x4d", "fc", {}),
    ("torchvision", "efficientnet_b4", "classifier.1", {}),
    ("torchvision", "mobilenet_v2", "classifier.1", {}),
    ("torchvision", "mobilenet_v3_small", "classifier.3", {}),
    ("torchvision", "densenet121", "classifier", {}),
    ("torchvision", "convnext_tiny", "classifier.2", {}),
    ("torchvision", "swin_t", "head", {}),
    ("torchvision", "vit_b_16", "heads.head", {"image_size": 64}),
    ("torchvision", "regnet_y_400mf", "fc", {}),
    ("torchvision", "vgg11_bn", "classifier.6", {}),
    ("torchvision", "googlenet", "fc", {}),
    ("torchvision", "inception_v3", "fc", {"size": 96}),
    ("timm", "vit_tiny_patch16_224", "head", {"img_size": 64}),
    ("timm", "mixer_s16_224", "head", {"img_size": 64}),
    ("timm", "deit_tiny_patch16_224", "head", {"img_size": 64}),
    ("timm", "beit_base_patch16_224", "head", {"img_size": 64, "depth": 3}),
    ("timm", "efficientnet_b0", "classifier", {}),
    ("timm", "resnet50_gn", "fc", {}),
    ("timm", "mobilenetv3_small_050", "classifier", {}),
    ("timm", "convnextv2_atto", "head.fc", {}),
    ("timm", "convnext_atto", "head.fc", {"head_hidden_size": 32}),  # an MLP before the last linear layer
]


def build(library: str, name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The default weight initialization", FutureWarning)  # googlenet, inception
        if library == "timm":
            return timm.create_model(name, num_classes=5, **options).eval()
        return torchvision.models.get_model(name, weights=None, num_classes=5, **options).eval()


def trained_head(model: nn.Module, head: str) -> None:
    """Some libraries start with a head of zeros, from which nothing can be learnt."""
    with torch.no_grad():
        layer = model.get_submodule(head)
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0)) / 10)


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name", "head", "options"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_network_adapts(library: str, name: str, head: str, options: dict) -> None:
    options = dict(options)
    size = options.pop("size", 64)
    model = build(library, name, **options)
    trained_head(model, head)
    x = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = model(x)
    for method, hyper in (("tsd", {"norm": "source"}), ("tent", {}), ("t3a", {}), ("shot-im", {"norm": "source"})):
        adapter = trueup.adapt(model, method, **hyper)
        first, second = adapter(x), adapter(x)
        assert adapter.net.head == head
        assert first.shape == (3, 5)
        assert second.isfinite().all()
        if adapter.method.norm == "source" and method != "t3a":
            torch.testing.assert_close(first, plain)
        if method in ("tsd", "tent", "shot-im"):
            assert adapter.updates == 2
        if method == "tent":
            norms = set(adapter.net.selected)
            assert norms
            assert norms < {n for n, _ in model.named_parameters()}
            assert not any(n.startswith(f"{head}.") for n in norms)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "name", "size", "candidates"),
    [
        ("torchvision", "squeezenet1_1", 64, r"classifier\.1"),
        ("timm", "deit_tiny_distilled_patch16_224", 224, "head, head_dist"),
    ],
)
def test_networks_without_one_head_are_refused(library: str, name: str, size: int, candidates: str) -> None:
    model = build(library, name)
    x = torch.randn(2, 3, size, size)
    with pytest.raises(HeadNotFoundError, match=rf"candidates: {candidates}; name one with head="):
        trueup.adapt(model, "tsd")(x)
    assert trueup.adapt(model, "pl", threshold=0.0)(x).isfinite().all()


def test_norm_counts() -> None:
    """Known numbers of affine values: 20 BatchNorms in a ResNet-18 with 4,800 channels in all."""
    adapter = trueup.adapt(build("torchvision", "resnet18"), "tent", example=torch.randn(1, 3, 32, 32))
    assert sum(p.numel() for p in adapter.net.selected.values()) == 2 * 4800
    adapter = trueup.adapt(build("timm", "vit_tiny_patch16_224"), "tent", example=torch.randn(1, 3, 224, 224))
    assert sum(p.numel() for p in adapter.net.selected.values()) == 2 * 192 * 25


PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SHOWN = [entry for entry in zoo.ENTRIES if entry.library in ("transformers", "open_clip", "MONAI")]


@pytest.mark.slow
def test_the_page_of_models_is_up_to_date() -> None:
    assert PAGE.read_text() == zoo.page(), "make it anew: python tests/zoo.py > docs/models.md"


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        answer = model(x)
    return answer if isinstance(answer, Tensor) else answer.logits


@pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: entry.id)
def test_small_models_of_a_library_adapt(entry: zoo.Entry) -> None:
    """The answer is the model's own, then what the method selects moves, and nothing else."""
    model, (x, other) = entry.build(), entry.batches()
    source, plain = copy.deepcopy(model.state_dict()), logits_of(model, x)
    dense = plain.ndim > 2
    affine = (entry.library, entry.name[:4]) != ("MONAI", "UNet")  # whose InstanceNorm has no parameters
    for method, hyper in (
        ("tsd", {"norm": "source"}),
        ("shot-im", {"norm": "source"}),
        ("tent", {} if affine else {"params": "all", "norm": "source"}),
        ("bn", {}),
        *([] if dense else [("t3a", {})]),
    ):
        adapter = trueup.adapt(model, method, **hyper)
        first, second = adapter(x), adapter(other)
        assert adapter.net.head == entry.head
        assert first.shape == second.shape == plain.shape
        assert second.isfinite().all()
        if method in ("tsd", "shot-im"):
            torch.testing.assert_close(first, plain)
        learns = method in ("tsd", "shot-im", "tent")
        assert adapter.updates == (2 if learns else 0)
        moved = {n for n, p in adapter.net.model.named_parameters() if not torch.equal(p, source[n])}
        assert bool(moved) == learns
        assert moved <= set(adapter.net.selected)
    assert all(torch.equal(t, source[n]) for n, t in model.state_dict().items())


def test_the_page_has_all_three_outcomes() -> None:
    """A table that could only say yes would not be worth much."""
    entry = next(e for e in zoo.ENTRIES if e.name == "SqueezeNet")
    model = entry.build()
    assert zoo.try_method(entry, model, "pl") == zoo.Outcome("works")
    assert zoo.try_method(entry, model, "bn").word == "idle"
    refused = zoo.try_method(entry, model, "t3a")
    assert (refused.word, "'classifier.1' is pooled" in refused.reason) == ("refused", True)
