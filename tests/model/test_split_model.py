"""Finding the head, and what is seen at it."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.model.heads import HeadNotFoundError, find_head
from trueup.model.split_model import SplitModel
from trueup.testing import convnet, images

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A small backbone with whatever comes after it."""

    def __init__(self, tail: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU())
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x))


def pooled(*layers: nn.Module) -> Net:
    return Net(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers)).eval()


def test_plain_linear_head() -> None:
    assert find_head(pooled(nn.Linear(8, 5)), X)[0] == "tail.2"


def test_layers_that_change_nothing_may_follow() -> None:
    assert find_head(pooled(nn.Linear(8, 5), nn.Dropout(), nn.Identity()), X)[0] == "tail.2"


def test_the_last_of_several_linear_layers() -> None:
    assert find_head(pooled(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 5)), X)[0] == "tail.4"


def test_convolution_head_that_is_flattened() -> None:
    model = Net(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 5, 1), nn.Flatten())).eval()
    assert find_head(model, X)[0] == "tail.1"
    out = attached(model)(X)
    assert out.features.shape == (2, 8)
    assert out.scores.shape == (2, 5)
    assert torch.equal(out.scores, out.logits)


def test_tsd_on_a_convolution_head_is_tsd_on_a_linear_one() -> None:
    conv = Net(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 5, 1), nn.Flatten())).eval().double()
    linear = pooled(nn.Linear(8, 5)).double()
    linear.body.load_state_dict(conv.body.state_dict())
    linear.tail[2].weight.data, linear.tail[2].bias.data = conv.tail[1].weight.data.flatten(1), conv.tail[1].bias.data
    for method in ("tsd", "t3a"):
        a, b = trueup.adapt(conv, method), trueup.adapt(linear, method)
        for seed in range(4):
            x = images(8, seed=seed)[0].double()
            torch.testing.assert_close(a(x), b(x))


@pytest.mark.parametrize("method", ["tsd", "t3a", "lame"])
def test_heads_that_see_maps_are_refused_for_classifiers(method: str) -> None:
    """A kernel that covers the map, a map that is pooled later, groups: none has one feature vector per image."""
    covers = Net(nn.Sequential(nn.Conv2d(8, 5, 8), nn.Flatten())).eval()
    later = Net(nn.Sequential(nn.Conv2d(8, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())).eval()
    grouped = Net(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1, groups=2), nn.Flatten())).eval()
    assert trueup.adapt(later, "shot-im", head="tail.0")(X).shape == (2, 5)  # it needs no features
    for model, head in ((covers, None), (covers, "tail.0"), (later, "tail.0"), (grouped, None), (grouped, "tail.1")):
        with pytest.raises(HeadNotFoundError):
            trueup.adapt(model, method, head=head)(X)


@pytest.mark.parametrize(
    "resize", [{"mode": "nearest"}, {"mode": "bilinear"}, {"mode": "bilinear", "align_corners": True}]
)
def test_head_whose_map_is_resized(resize: dict) -> None:
    model = Net(nn.Sequential(nn.Conv2d(8, 5, 3, padding=1), nn.Upsample(scale_factor=2, **resize))).eval()
    name, logits = find_head(model, X)
    assert (name, tuple(logits.shape)) == ("tail.0", (2, 5, 16, 16))
    net = attached(model)
    assert net(X).features.shape == (2, 8, 8, 8)
    torch.testing.assert_close(net.weight, model.tail[0].weight.sum(dim=(2, 3)))


def attached(model: nn.Module) -> SplitModel:
    net = SplitModel(model)
    name, logits = find_head(model, X)
    net.attach(name, logits.shape[1])
    return net


def test_a_grouped_map_is_no_head() -> None:
    with pytest.raises(HeadNotFoundError):
        find_head(Net(nn.Conv2d(8, 4, 1, groups=2)).eval(), X)


def test_a_bare_head_is_a_model() -> None:
    head = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    assert find_head(head, x)[0] == ""
    adapter = trueup.adapt(head, "tsd")
    torch.testing.assert_close(adapter(x), head(x).detach())
    assert "head ''" in repr(adapter)


def test_features_scores_and_weight() -> None:
    model = convnet()
    net = attached(model)
    out = net(X)
    assert torch.equal(out.features, model[:-1](X))
    assert torch.equal(out.logits, model(X))
    assert torch.equal(net.weight, model.head.weight)
    assert torch.equal(net.classify(out.features), out.scores)


class Averaged(nn.Module):
    """Two heads, averaged, as distilled models do."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.head_dist = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(x) + self.head_dist(x)) / 2


def test_refusal_names_the_candidates() -> None:
    with pytest.raises(HeadNotFoundError, match=r"candidates: head, head_dist; name one with head="):
        find_head(Averaged(), torch.randn(2, 4))
    pools_later = Net(nn.Sequential(nn.Conv2d(8, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())).eval()
    with pytest.raises(HeadNotFoundError, match=r"candidates: tail\.0"):
        find_head(pools_later, X)


def test_a_head_whose_output_is_changed_in_place_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).mul_(5)

    with pytest.raises(HeadNotFoundError, match="candidates: head;"):
        find_head(Scaled(), torch.randn(2, 4))


def test_methods_that_need_no_head_do_without() -> None:
    x = torch.randn(6, 4)
    for method in ("source", "bn", "pl"):
        adapter = trueup.adapt(Averaged(), method)
        assert adapter(x).shape == (6, 3)
        assert "no head" in repr(adapter)
    for method, hyper in (("tsd", {}), ("t3a", {}), ("lame", {}), ("shot-im", {}), ("pl", {"params": "head"})):
        with pytest.raises(HeadNotFoundError, match="head="):
            trueup.adapt(Averaged(), method, **hyper)(x)


def test_a_named_head_is_used() -> None:
    adapter = trueup.adapt(Averaged(), "tsd", head="head")
    adapter(torch.randn(6, 4))
    assert adapter.net.head == "head"


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fc' is no linear or convolution layer.*conv0, conv1, head"):
        trueup.adapt(convnet(), "tsd", head="fc", example=X)
    with pytest.raises(ValueError, match=r"'conv0' gives \[\(2, 16, 8, 8\)\] for logits"):
        trueup.adapt(convnet(), "tsd", head="conv0", example=X)


def test_a_head_that_runs_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.head(x))

    with pytest.raises(HeadNotFoundError):
        trueup.adapt(Twice(), "tsd")(torch.randn(2, 3))
    with pytest.raises(ValueError, match="ran 2 times"):
        trueup.adapt(Twice(), "tsd", head="head")(torch.randn(2, 3))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: {"out": y, "aux": 0 * y},
        lambda y: {"logits": y},
        lambda y: SimpleNamespace(logits=y),
    ],
    ids=["out", "logits", "attribute"],
)
def test_what_models_return(wrap: object) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convnet()

        def forward(self, x: Tensor) -> object:
            return wrap(self.inner(x))

    adapter = trueup.adapt(Wrapped(), "tsd", norm="source")
    torch.testing.assert_close(adapter(X), convnet()(X).detach())


def test_other_returns_need_output() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convnet()

        def forward(self, x: Tensor) -> object:
            return self.inner(x), x

    with pytest.raises(ValueError, match="returned tuple; pass output="):
        trueup.adapt(Pair(), "tent")(X)
    assert trueup.adapt(Pair(), "tent", output=lambda pair: pair[0])(X).shape == (2, 6)


def test_answers_that_are_no_logits_are_refused() -> None:
    for tail in (nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 5), nn.Flatten(0))):
        with pytest.raises(ValueError, match="logits must be"):
            trueup.adapt(pooled(tail), "pl")(X)


def test_a_parametrised_head_gives_its_effective_weight() -> None:
    model = convnet()
    model.head = nn.utils.parametrizations.weight_norm(model.head)
    net = attached(model)
    torch.testing.assert_close(net.weight, model.head.weight)
    adapter = trueup.adapt(model, "tsd")
    assert adapter(images(16, seed=0)[0]).isfinite().all()


def test_a_clone_has_its_own_weights() -> None:
    net = attached(convnet())
    twin = net.clone()
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    assert not torch.equal(next(net.parameters()), next(twin.parameters()))
    assert not any(p.requires_grad for p in twin.parameters())
