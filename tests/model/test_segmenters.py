"""Segmenters of libraries and home-made ones: the head is found, batches of one work, what cannot work says why."""

import copy

import pytest
import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import trueup
from trueup.model.split_model import SplitModel
from trueup.norm import make_policy
from trueup.testing import scenes, segnet

torchvision_segmenters = torchvision.models.segmentation


class HomeMade(nn.Module):
    """A U-Net of one level."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.out(torch.cat((skip, self.up(self.deep(skip))), dim=1))


def tv(name: str, **options: object) -> nn.Module:
    model: nn.Module = getattr(torchvision_segmenters, name)(
        weights=None, weights_backbone=None, num_classes=3, **options
    )
    return model


MODELS = {
    "smp DeepLabV3+": (
        lambda: smp.DeepLabV3Plus("mobilenet_v2", encoder_weights=None, classes=3),
        "segmentation_head.0",
    ),
    "smp U-Net": (lambda: smp.Unet("mobilenet_v2", encoder_weights=None, classes=3), "segmentation_head.0"),
    "smp FPN": (lambda: smp.FPN("mobilenet_v2", encoder_weights=None, classes=3), "segmentation_head.0"),
    "torchvision DeepLabV3": (lambda: tv("deeplabv3_mobilenet_v3_large", aux_loss=True), "classifier.4"),
    "torchvision FCN": (lambda: tv("fcn_resnet50"), "classifier.4"),
    "home-made": (HomeMade, "out"),
}


@pytest.mark.parametrize("multilabel", [False, True], ids=["classes", "labels"])
@pytest.mark.parametrize("name", MODELS)
def test_tsd_takes_it(name: str, multilabel: bool) -> None:
    """The answer is the model's own with batch statistics, the head is the right one, and every weight may move."""
    torch.manual_seed(0)
    make, head = MODELS[name]
    model = make().eval()
    x = torch.randn(3, 3, 64, 64)
    adapter = trueup.adapt(model, "tsd", multilabel=multilabel)
    policy = make_policy("batch")
    policy.restart(model, classes=None, dense=True)
    with torch.no_grad(), policy.active(model):
        plain = model(x)
    plain = plain["out"] if isinstance(plain, dict) else plain
    torch.testing.assert_close(adapter(x), plain, rtol=1e-4, atol=1e-5)
    assert adapter.net.head == head
    assert adapter.updates == 1
    assert adapter(x[:1]).shape == (1, 3, 64, 64)  # DeepLab pools an image into one value


@pytest.mark.parametrize("name", MODELS)
def test_the_head_explains_the_logits(name: str) -> None:
    """head(features), resized, are the logits: for 1×1 heads by hand, whatever follows."""
    torch.manual_seed(0)
    make, head = MODELS[name]
    model = make().eval()
    x = torch.randn(2, 3, 64, 64)
    net = SplitModel(copy.deepcopy(model))
    net.attach(head, 3, dense=True)
    with torch.no_grad():
        out = net(x)
    layer = model.get_submodule(head)
    with torch.no_grad():
        by_hand = F.conv2d(out.features, layer.weight, layer.bias, padding=layer.padding)
    torch.testing.assert_close(out.scores, by_hand)
    z, p = out.flat()
    rows, (n, _, h, w) = layer.weight.sum(dim=(2, 3)), out.scores.shape
    assert z.shape == (n * h * w, rows.shape[1])
    assert torch.equal(p[h * w + w], out.scores[1, :, 1, 0])  # the second image, second row, first column
    torch.testing.assert_close(net.weight, rows)
    if layer.kernel_size == (1, 1):
        with torch.no_grad():
            torch.testing.assert_close(net.classify(z), p, rtol=1e-4, atol=1e-5)


def test_lr_aspp_is_refused_where_a_head_is_needed() -> None:
    model, x = tv("lraspp_mobilenet_v3_large"), torch.randn(2, 3, 64, 64)
    combined = r"low_classifier' and 'classifier\.high_classifier' are combined"
    with pytest.raises(ValueError, match=rf"{combined}.*low_classifier, classifier\.high_classifier"):
        trueup.adapt(model, "tsd")(x)
    assert trueup.adapt(model, "tent")(x).shape == (2, 3, 64, 64)


def test_a_single_channel_is_a_label() -> None:
    model, x = HomeMade(channels=1), torch.randn(2, 3, 16, 16)
    with pytest.raises(ValueError, match=r"at least two classes; multilabel=True if"):
        trueup.adapt(model, "tsd")(x)
    for method in trueup.list_methods("segmentation"):
        assert trueup.adapt(model, method, multilabel=True)(x).shape == (2, 1, 16, 16)
    with pytest.raises(ValueError, match="multilabel='yes' must be True or False"):
        trueup.adapt(model, "tsd", multilabel="yes")


def test_sizes_that_a_network_cannot_take_are_said() -> None:
    model = smp.DeepLabV3Plus("mobilenet_v2", encoder_weights=None, classes=3)
    with pytest.raises(ValueError, match=r"cannot take images of shape \(3, 60, 64\)"):
        trueup.adapt(model, "tsd")(torch.randn(2, 3, 60, 64))


def test_few_values_keep_the_source_statistics() -> None:
    """A segmenter's pooled branch sees one value per image: below 16 images the source's statistics serve."""
    layer = nn.BatchNorm2d(4).eval()
    layer.running_mean.fill_(3.0)
    policy = make_policy("batch")
    policy.restart(layer, classes=None, dense=True)
    for n, own in ((2, True), (15, True), (16, False)):
        x = torch.randn(n, 4, 1, 1)
        with policy.active(layer):
            found = layer(x)
        expected = (x - 3) / (1 + 1e-5) ** 0.5 if own else F.batch_norm(x, None, None, training=True)
        torch.testing.assert_close(found, expected)
    dense = trueup.adapt(segnet(), "bn", example=scenes(2, seed=0)[0])
    assert dense.net.policy.fewest == 16
    assert trueup.adapt(nn.Linear(4, 3), "bn", example=torch.randn(2, 4)).net.policy.fewest == 2


def test_pooled_branch_of_deeplab_keeps_its_statistics() -> None:
    model = smp.DeepLabV3Plus("mobilenet_v2", encoder_weights=None, classes=3).eval()
    pooled = model.get_submodule("decoder.aspp.0.convs.4.2")
    nn.init.uniform_(pooled.running_var, 50, 60)  # with the batch's own deviation the answer would be far off
    small = copy.deepcopy(model)
    nn.init.uniform_(small.get_submodule("decoder.aspp.0.convs.4.2").running_var, 1e-3, 2e-3)
    x = torch.randn(4, 3, 64, 64)
    a, b = trueup.adapt(model, "bn")(x), trueup.adapt(small, "bn")(x)
    assert not torch.allclose(a, b, atol=1e-3)  # they differ in nothing else


@pytest.mark.parametrize("method", ["tent", "pl", "shot-im", "eta"])
def test_each_label_is_a_problem_of_its_own(method: str) -> None:
    """The loss of a multi-label model is the mean of the losses of its labels as two-class segmenters."""
    model, x = segnet(multilabel=True).double(), scenes(4, seed=1, shift=0.5)[0].double()
    hyper = {"margin": 0.9} if method == "eta" else {}
    adapter = trueup.adapt(model, method, multilabel=True, example=x, **hyper)
    out = adapter.hooks.forward(adapter.net, x, adapter.state)
    loss = adapter.hooks.loss(adapter.net, out, adapter.state)
    alone = []
    for k in (0, 1):
        p = out.logits[:, k]
        single = trueup.adapt(
            Constant(torch.stack((torch.zeros_like(p), p), dim=1).detach()), method, params="none", **hyper
        )
        single(x)
        seen = single.hooks.forward(single.net, x, single.state)
        value = single.hooks.loss(
            single.net, seen, trueup.adapt(single.unwrap(), method, params="none", **hyper, example=x).state
        )
        alone.append(value)
    assert loss is not None
    torch.testing.assert_close(loss.detach(), torch.stack(alone).mean().detach())


class Constant(nn.Module):
    """Answers always the same."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.scale = nn.Conv2d(2, 2, 1, bias=False).double()
        self.scale.weight.data.copy_(torch.eye(2).view(2, 2, 1, 1))
        self.register_buffer("logits", logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.logits[: len(x)])


def test_state_of_a_segmenter_is_told_apart(tmp_path) -> None:
    """By name, loaded before the first batch; other readings of the channels are refused."""
    x = scenes(3, seed=0)[0]
    adapter = trueup.adapt(segnet(), "tsd", queries=64)
    first = adapter(x)
    adapter.save(tmp_path / "a.safetensors")
    other = trueup.adapt(segnet(), "tsd", queries=64)
    other.load(tmp_path / "a.safetensors")
    assert torch.equal(adapter(x), other(x))
    assert not torch.equal(first, other(x))
    with pytest.raises(ValueError, match="read otherwise"):
        trueup.adapt(segnet(), "tsd", queries=64, multilabel=True).load(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="other hyper-parameters"):
        trueup.adapt(segnet(), "tsd").load(tmp_path / "a.safetensors")


def test_three_dimensional_networks() -> None:
    """A segmenter of volumes is one of voxels."""
    model = nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(), nn.Conv3d(6, 3, 1))
    adapter = trueup.adapt(model, "tsd")
    assert adapter(torch.randn(2, 1, 6, 8, 8)).shape == (2, 3, 6, 8, 8)
    assert adapter.updates == 1


@pytest.mark.parametrize("head", [nn.Conv2d(8, 3, 3), nn.Conv2d(8, 3, 2, stride=2)], ids=["valid", "stride"])
def test_a_head_that_changes_the_size_is_refused_where_features_are_needed(head: nn.Module) -> None:
    """Pixels of its input and its output are not the same ones."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()), head

        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(self.head(self.body(x)), size=x.shape[2:], mode="bilinear")

    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(ValueError, match="candidates: head"):
        trueup.adapt(Net(), "tsd")(x)
    assert trueup.adapt(Net(), "tent")(x).shape == (2, 3, 16, 16)


def test_maps_of_one_pixel_stay_maps() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 16, stride=16), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1), nn.Upsample(scale_factor=16)
    )
    for first, then in ((32, 16), (16, 32)):
        adapter = trueup.adapt(model, "tsd")
        assert adapter(torch.randn(2, 3, first, first)).shape == (2, 3, first, first)
        assert adapter(torch.randn(2, 3, then, then)).shape == (2, 3, then, then)


def test_under_autocast_a_resized_head_is_found() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(self.net(x).float(), scale_factor=2, mode="bilinear")

    adapter = trueup.adapt(Net(), "tsd")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = adapter(torch.randn(2, 3, 16, 16))
    assert answer.dtype == torch.float32
    assert adapter.net.head == "net.3"


def test_probabilities_are_refused() -> None:
    """A softmax of a softmax is nearly uniform; every method would learn from that."""
    model, x = nn.Sequential(HomeMade(), nn.Softmax(dim=1)), torch.randn(2, 3, 16, 16)
    for method in ("source", "tent", "tsd"):
        with pytest.raises(ValueError, match=r"(probabilities, not logits|no linear layer)"):
            trueup.adapt(model, method)(x)
    assert trueup.adapt(model, "tent", output=torch.log)(x).shape == (2, 3, 16, 16)
