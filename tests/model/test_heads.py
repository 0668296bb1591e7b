"""Heads beyond a linear layer, and models that have none: what is found, what is refused, and with which reason."""

import functools
import itertools
import re
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from monai.networks.nets import UNet
from torch import Tensor, nn

import trueup
from trueup.model.heads import HeadNotFoundError, find_head
from trueup.model.probabilities import NotLogitsError
from trueup.model.readout import classify, weight_of, width_of
from trueup.testing import convnet, images

X = images(16, seed=0, shift=1.0)[0]
FLAT = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
UNDO = functools.partial(torch.logit, eps=1e-6)


class Followed(nn.Module):
    """A model, and a function of its answer."""

    def __init__(self, function: Any, model: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.function = model or convnet(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner(x))


def segmenter(*tail: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1), *tail)


# Answers that are no logits


SIGMOIDS = {
    "method": torch.sigmoid,
    "module": nn.Sigmoid(),
    "special": torch.special.expit,
    "hard": nn.Hardsigmoid(),
    "clamped": lambda y: y.sigmoid().clamp(1e-4, 1 - 1e-4),
    "in place": lambda y: y.sigmoid_(),
    "key": lambda y: {"logits": y.sigmoid()},
}


@pytest.mark.parametrize("method", ["tsd", "tent", "bn", "source"])
@pytest.mark.parametrize("sigmoid", SIGMOIDS.values(), ids=SIGMOIDS)
def test_a_sigmoid_at_the_end_is_refused(sigmoid: Any, method: str) -> None:
    adapter = trueup.adapt(Followed(sigmoid), method)
    way = re.escape("pass output=functools.partial(torch.logit, eps=1e-6)")
    with pytest.raises(NotLogitsError, match=f"probabilities, not logits: its answers come from a sigmoid; .*{way}"):
        adapter(X)
    assert (adapter.batches, adapter.net.head) == (0, None)


def test_a_sigmoid_is_refused_for_pixels_for_labels_and_for_one_image() -> None:
    dense = segmenter(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Sigmoid())
    for model, x, more in (
        (dense, X, {}),
        (segmenter(nn.Sigmoid(), nn.Upsample(scale_factor=2, mode="bilinear")), X, {}),
        (Followed(torch.sigmoid), X, {"multilabel": True}),
        (Followed(torch.sigmoid), X[:1], {}),
        (Followed(torch.sigmoid), X, {"head": "inner.head"}),
    ):
        with pytest.raises(NotLogitsError, match="come from a sigmoid"):
            trueup.adapt(model, "tsd", **more)(x)


@pytest.mark.parametrize("method", ["tsd", "tent", "t3a"])
def test_the_way_out_of_a_sigmoid_is_the_model_without_it(method: str) -> None:
    """In float64, where undoing a sigmoid costs nothing; float32 below."""
    undone = trueup.adapt(Followed(torch.sigmoid).double(), method, output=functools.partial(torch.logit, eps=1e-12))
    plain = trueup.adapt(convnet().double(), method)
    for seed in range(3):
        x = images(16, seed=seed, shift=1.0)[0].double()
        torch.testing.assert_close(undone(x), plain(x), rtol=1e-5, atol=1e-5)
    assert undone.net.head == "inner.head"


def test_the_way_out_that_is_named_finds_the_head() -> None:
    for model, x in ((Followed(torch.sigmoid), X), (segmenter(nn.Sigmoid()), X)):
        adapter = trueup.adapt(model, "tsd", output=UNDO)
        first = adapter(x)
        assert adapter.net.head in ("inner.head", "3")
        assert adapter.updates == 1
        assert first.isfinite().all()


def test_an_output_function_is_no_licence_for_another_layer() -> None:
    """Two small heads and their mean are nearly equal; neither is the logits."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(8, 5, bias=False), nn.Linear(8, 5, bias=False)
            for p in self.parameters():
                p.data.mul_(1e-3)

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return ((self.one(x) + self.two(x)) / 2,)

    with pytest.raises(HeadNotFoundError, match="'one' and 'two' are combined"):
        trueup.adapt(Averaged(), "tsd", output=lambda y: y[0])(FLAT)
    large = Followed(lambda y: (30 + y.relu(),), nn.Sequential(nn.Linear(8, 5)))  # beyond what a sigmoid can undo
    large.inner[0].bias.data.fill_(20.0)
    with pytest.raises(HeadNotFoundError):
        trueup.adapt(large, "tsd", output=lambda y: y[0])(FLAT)


@pytest.mark.parametrize("method", ["tsd", "tent", "source"])
def test_a_softmax_is_refused_still_and_its_logarithm_is_the_way_out(method: str) -> None:
    model = Followed(functools.partial(F.softmax, dim=1))
    with pytest.raises(ValueError, match=r"probabilities, not logits.*output=torch\.log"):
        trueup.adapt(model, method)(X)
    plain, undone = trueup.adapt(convnet(), method), trueup.adapt(model, method, output=torch.log)
    torch.testing.assert_close(undone(X), plain(X).log_softmax(dim=1), rtol=1e-4, atol=1e-4)
    assert undone.net.head == "inner.head"


def test_log_probabilities_are_logits() -> None:
    adapter = trueup.adapt(Followed(functools.partial(F.log_softmax, dim=1)), "tsd")
    adapter(X)
    assert adapter.net.head == "inner.head"


def test_values_between_0_and_1_of_several_images_are_refused_whatever_made_them() -> None:
    model = Followed(lambda y: (y.tanh() + 1) / 2)
    with pytest.raises(NotLogitsError, match=r"of 16 images are all between 0 and 1; .*output=lambda y: y if they"):
        trueup.adapt(model, "pl")(X)
    assert trueup.adapt(model, "pl", output=lambda y: y)(X).isfinite().all()  # as the error says
    dense = Followed(model.function, segmenter())
    assert trueup.adapt(dense, "pl")(X[:1]).isfinite().all()  # one image says too little, however many pixels it has
    with pytest.raises(NotLogitsError, match="of 2 images are all between 0 and 1"):
        trueup.adapt(dense, "pl")(X[:2])


def test_genuine_logits_between_0_and_1_are_not_refused() -> None:
    """After a ReLU they often are; and those of linear layers and their sums may be by chance."""
    small = nn.Sequential(nn.Linear(8, 5), nn.ReLU())
    small[0].weight.data.mul_(0.1)
    small[0].bias.data.fill_(0.3)
    with torch.no_grad():
        assert bool(((small(FLAT) >= 0) & (small(FLAT) <= 1)).all())
    for model in (small, small[:1], nn.Sequential(small[0], nn.ReLU6()), Followed(lambda y: y.clamp(min=0), small[0])):
        assert trueup.adapt(model, "pl", threshold=0.0)(FLAT).isfinite().all()
    assert trueup.adapt(small[:1], "tsd")(FLAT).isfinite().all()
    scaled = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), small[0], nn.LayerNorm(5))
    scaled[3].weight.data.mul_(0.01)
    scaled[3].bias.data.fill_(0.5)
    halves = nn.Linear(8, 10)
    halves.weight.data.mul_(0.1)
    halves.bias.data.fill_(0.5)
    for model in (scaled, Followed(lambda y: (y[:, :5] + y[:, 5:]) / 2, halves)):
        assert bool(((model(FLAT) >= 0) & (model(FLAT) <= 1)).all())
        assert trueup.adapt(model, "pl", threshold=0.0)(FLAT).isfinite().all()


def without_head(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name.startswith("timm"):
        small = {"img_size": 32, "depth": 1} if "vit" in name else {}
        return timm.create_model(name.split()[1], num_classes=0, **small)
    model = torchvision.models.get_model(name, weights=None)
    for place in ("fc", "classifier.3", "classifier"):
        if isinstance(dict(model.named_modules()).get(place), nn.Linear):
            parent, _, leaf = place.rpartition(".")
            setattr(model.get_submodule(parent), leaf, nn.Identity())
    return model


@pytest.mark.parametrize("method", ["tsd", "pl"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("timm vit_tiny_patch16_224", "its num_classes is 0"),
        ("timm resnet10t", "its num_classes is 0"),
        ("resnet18", "'fc', which should classify, is an Identity"),
        ("mobilenet_v3_small", r"'classifier\.3', which should classify, is an Identity"),
    ],
)
def test_models_without_a_head_are_refused(name: str, reason: str, method: str) -> None:
    with pytest.raises(NotLogitsError, match=rf"returns features, not logits: {reason}.*output=lambda y: y"):
        trueup.adapt(without_head(name), method)(torch.randn(3, 3, 32, 32))


def test_features_can_come_out_of_a_pooling_or_normalisation_layer() -> None:
    class Body(nn.Module):
        def __init__(self, last: nn.Module) -> None:
            super().__init__()
            self.a, self.b, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3), last

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.a(x) * self.b(x)).relu()).flatten(1)

    with pytest.raises(NotLogitsError, match=r"come out of 'last' \(AdaptiveAvgPool2d\), and no linear layer"):
        trueup.adapt(Body(nn.AdaptiveAvgPool2d(1)), "pl")(X)

    class NormedLinear(nn.Module):
        """A cosine classifier, whose name speaks of a norm."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.normalize(x.mean(dim=(2, 3)), dim=1), F.normalize(self.weight, dim=1))

    assert trueup.adapt(Body(NormedLinear()), "pl")(X).shape == (16, 5)


def test_a_normalised_answer_of_a_linear_layer_is_no_feature() -> None:
    model = nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5), nn.Identity())
    assert trueup.adapt(model, "pl", threshold=0.0)(FLAT).shape == (16, 5)


# Transposed convolutions and residual sums


def response(layer: nn.Module, dims: int, axes: int) -> tuple[Tensor, Tensor]:
    """Weight and bias by brute force: the mean answer inside a map of equal features, one feature after the other."""
    side = 12

    def inside(features: Tensor) -> Tensor:
        with torch.no_grad():
            out = layer(features[None, :, *(None,) * axes].expand(1, dims, *(side,) * axes))
        cut = out.shape[2] // 3  # no pixel in there sees the border, and the period of a stride fits
        return out[0][(slice(None), *(slice(cut, 2 * cut),) * axes)].flatten(1).mean(dim=1)

    bias = inside(torch.zeros(dims))
    return torch.stack([inside(row) - bias for row in torch.eye(dims)], dim=1), bias


KERNELS = [(2, 2, 0, 0), (3, 2, 1, 1), (4, 2, 1, 0), (4, 4, 0, 0), (3, 1, 1, 0), (5, 2, 2, 1)]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_weight_of_a_transposed_convolution_is_its_answer_to_equal_features(
    kernel: tuple[int, ...], axes: int
) -> None:
    torch.manual_seed(0)
    k, stride, padding, more = kernel
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
    layer = kind(4, 3, k, stride=stride, padding=padding, output_padding=more)
    weight, bias = response(layer, 4, axes)
    assert width_of(layer) == 3
    torch.testing.assert_close(weight_of(layer), weight, rtol=1e-4, atol=1e-5)
    features = torch.randn(5, 4)
    torch.testing.assert_close(classify(layer, features), features @ weight.T + bias, rtol=1e-4, atol=1e-5)


class Residual(nn.Module):
    """A sum of linear layers."""

    def __init__(self, axes: int, skip: nn.Module, dims: int = 3) -> None:
        super().__init__()
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        self.body = nn.Sequential(kind(dims, 4, 3, padding=1), nn.Dropout(), kind(4, 3, 3, padding=2, dilation=2))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.skip(x)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("skip", ["identity", "convolution"])
def test_the_weight_of_a_residual_sum_has_its_skip(axes: int, skip: str) -> None:
    torch.manual_seed(0)
    kind = (nn.Conv1d, nn.Conv2d)[axes - 1]
    layer = Residual(axes, nn.Identity() if skip == "identity" else kind(3, 3, 1)).eval()
    weight, bias = response(layer, 3, axes)
    torch.testing.assert_close(weight_of(layer), weight, rtol=1e-4, atol=1e-5)
    features = torch.randn(5, 3)
    torch.testing.assert_close(classify(layer, features), features @ weight.T + bias, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(classify(layer, features).square().sum(), layer.body[0].weight)
    assert grad.any()  # a loss of these scores reaches the layers
    with torch.no_grad():
        assert not classify(layer, features).requires_grad


def test_a_residual_sum_of_linear_layers_on_vectors() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(8, 5), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x)

    model = nn.Sequential(OrderedDict(body=nn.Linear(8, 8), head=Add()))
    adapter = trueup.adapt(model, "tsd")
    adapter(FLAT)
    assert adapter.net.head == "head"
    model.eval()
    torch.testing.assert_close(weight_of(model.head), model.head.one.weight + model.head.two.weight)


def test_a_module_that_is_not_linear_or_takes_more_is_no_head() -> None:
    class Bent(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).relu() + x

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.layer(x) + skip

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = Two()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x, x.flip(3))

    for model in (nn.Sequential(nn.Conv2d(3, 3, 1), Bent(2, nn.Identity())), Skipping()):
        with pytest.raises(HeadNotFoundError):
            find_head(model.eval(), X)


def unet(axes: int, units: int, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return UNet(axes, in_channels=1, out_channels=3, channels=(4, 8), strides=(2,), num_res_units=units, **options)


@pytest.mark.parametrize("units", [0, 2])
@pytest.mark.parametrize("axes", [2, 3])
def test_unets_of_monai_run_tsd(axes: int, units: int) -> None:
    """Without residual units they end in a transposed convolution, with them in a residual sum."""
    model, x = unet(axes, units), torch.randn(2, 1, *(16,) * axes, generator=torch.Generator().manual_seed(1))
    adapter = trueup.adapt(model, "tsd")
    with torch.no_grad():
        torch.testing.assert_close(adapter(x), model.eval()(x))
    adapter(x)
    assert (adapter.task, adapter.updates) == ("segmentation", 2)
    layer = model.get_submodule(adapter.net.head)
    assert isinstance(layer, nn.ConvTranspose2d | nn.ConvTranspose3d) == (units == 0)
    adapter.reset()
    weight, bias = response(layer, adapter.net.weight.shape[1], axes)
    torch.testing.assert_close(adapter.net.weight, weight, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        out = adapter.net(x)
        assert out.features.shape[2:] == out.scores.shape[2:] == (8 if units == 0 else 16,) * axes
        flat = torch.randn(7, weight.shape[1])
        torch.testing.assert_close(adapter.net.classify(flat), flat @ weight.T + bias, rtol=1e-4, atol=1e-5)


def test_scores_of_a_transposed_convolution_are_means_over_the_pixels_of_a_feature() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 3, 2, stride=2))
    adapter = trueup.adapt(model, "tsd", norm="source", example=X)
    with torch.no_grad():
        out = adapter.net(X)
    blocks = out.logits.unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(4, 5))
    torch.testing.assert_close(out.scores, blocks)
    features, scores = out.flat()
    torch.testing.assert_close(adapter.net.classify(features), scores, rtol=1e-4, atol=1e-5)


def test_tent_says_what_else_can_be_updated_where_normalisation_is_not_affine() -> None:
    model = unet(2, 2)
    with pytest.raises(ValueError, match=r"5 × InstanceNorm2d\) have no affine parameters; update others.*'all'"):
        trueup.adapt(model, "tent")
    affine = unet(2, 2, norm=("instance", {"affine": True}))
    for other, hyper in ((model, {"params": "all", "lr": 1e-5}), (unet(2, 2, norm="batch"), {}), (affine, {})):
        adapter = trueup.adapt(other, "tent", **hyper)
        adapter(torch.randn(2, 1, 16, 16))
        assert adapter.updates == 1


# Causes


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x) + x


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.far, self.near = nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return (self.far(x) + self.near(x)) / 2


class Cosine(nn.Module):
    """A zero-shot classifier that is made by hand; features need not come from a linear layer."""

    def __init__(self, scale: float = 20.0, bias: float = 0.0, registered: bool = True) -> None:
        super().__init__()
        self.visual, text = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), torch.randn(5, 6)
        self.scale, self.bias = scale, bias
        if registered:
            self.register_buffer("text", text)
        else:
            self.text = text

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.normalize(self.visual(x), dim=1) @ F.normalize(self.text, dim=1).T + self.bias


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to move these to another package
        return torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)), {nn.Linear}, dtype=torch.qint8
        )


def vectors(*tail: nn.Module, scale: float = 1.0) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5), *tail)
    model[2].weight.data.mul_(scale)
    return model


CAUSES: dict[str, tuple[Any, Tensor, str, str]] = {
    "transposed": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1)),
        X, r"'1' is a transposed convolution from \(16, 16\) pixels to \(31, 31\), which is no multiple", "1",
    ),
    "residual": (Sum, X, r"a skip is added to 'head' \(a residual sum\); put the sum into a module", "body, head"),
    "cosine": (Cosine, FLAT, r"cosine similarities .*trueup\.zero_shot\(model, text_features\)", "none"),
    "cosine with a bias": (lambda: Cosine(5.0, -10.0, registered=False), FLAT, "cosine similarities", "none"),
    "quantised": (quantised, FLAT, "quantised layers, which have no weights that could be read", "none"),
    "softmax": (lambda: vectors(nn.Softmax(dim=1)), FLAT, r"a softmax follows it; .*output=torch\.log", "2"),
    "saturated softmax": (lambda: vectors(nn.Softmax(dim=1), scale=1e3), FLAT, "a softmax follows it", "2"),
    "sigmoid": (lambda: vectors(nn.Sigmoid()), FLAT, "a sigmoid follows it; leave it out", "2"),
    "pooled": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), X,
        "the map of '0' is pooled after it", "0",
    ),
    "SqueezeNet": (
        lambda: torchvision.models.squeezenet1_1(num_classes=5), torch.randn(2, 3, 32, 32),
        r"the map of 'classifier\.1' is pooled after it", r"classifier\.1",
    ),
    "two": (Mean, FLAT, "'far' and 'near' are combined", "far, near"),
    "groups": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, groups=2)), X, "'1' has 2 groups", "0"),
    "smaller": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 3)), X, "'1' changes the size", "1"),
    "covering": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 16), nn.Flatten()), X,
        r"'1' sees maps of \(16, 16\) pixels", "1",
    ),
    "scaled": (lambda: Followed(lambda y: 3 * y, vectors()), FLAT, "something follows it", r"inner\.2"),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named_and_only_layers_that_can_be_heads(cause: str) -> None:
    torch.manual_seed(0)
    make, x, reason, candidates = CAUSES[cause]
    end = "$" if candidates == "none" else "; name one with head="
    with pytest.raises(HeadNotFoundError, match=rf"logits: .*{reason}.*; candidates: {candidates}{end}"):
        find_head(make().eval(), x)


def test_causes_reach_the_user_and_leave_no_hooks() -> None:
    torch.manual_seed(0)
    model = Cosine()
    with pytest.raises(HeadNotFoundError, match="cosine similarities"):
        trueup.adapt(model, "tsd")(FLAT)
    with pytest.raises(HeadNotFoundError):
        find_head(model, FLAT)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_float_parts_of_quantisable_models_are_no_cause() -> None:
    """Torch keeps its float placeholders for later quantisation among the quantised layers."""
    model = Mean()
    model.add = torch.ao.nn.quantized.FloatFunctional()
    with pytest.raises(HeadNotFoundError, match="'far' and 'near' are combined"):
        find_head(model, FLAT)


@pytest.mark.parametrize("axes", [2, 3])
def test_a_resized_map_in_two_and_three_dimensions(axes: int) -> None:
    kind, mode = ((nn.Conv2d, "bilinear"), (nn.Conv3d, "trilinear"))[axes - 2]
    x = torch.randn(2, 3, *(8,) * axes)
    for corners, factor in itertools.product((False, True), (2, 3)):
        model = nn.Sequential(kind(3, 4, 1), nn.Upsample(scale_factor=factor, mode=mode, align_corners=corners))
        assert find_head(model, x)[0] == "0"
