import math
from typing import Any

import pytest
import torch
from byhand import PROBS, ROWS, X, entropy, identity_head
from torch import Tensor, nn

import trueup
from trueup.methods.deyo import shuffle_patches
from trueup.model.split_model import Output
from trueup.testing import convnet, images

# What the shuffled images' predictions are: the first falls by 0.25, the second by 1/11, the third stays.
SHUFFLED = [[0.5, 0.5], [2 / 11, 9 / 11], [0.5, 0.5]]


def loss_of(x: Tensor = X, **hyper: Any) -> Tensor | None:
    adapter = trueup.adapt(identity_head(), "deyo", params="all", example=X, **hyper)
    out, logits = adapter.net(x), torch.tensor(SHUFFLED, dtype=torch.float64).log()
    out.memo["shuffled"] = Output(x, logits, logits, logits)
    return adapter.method.loss(adapter.net, out, adapter.state)


def weighted(i: int, margin: float) -> float:
    h, label = entropy(PROBS[i]), PROBS[i].index(max(PROBS[i]))
    fall = PROBS[i][label] - SHUFFLED[i][label]
    return (math.exp(margin * math.log(2) - h) + math.exp(fall)) * h


def test_loss_by_hand() -> None:
    """H < 0.9 ln 2 keeps the first two, of which a fall of 0.2 keeps the first, one of 0.05 both."""
    assert float(loss_of(margin=0.9).detach()) == pytest.approx(weighted(0, 0.4), abs=1e-8)
    both = (weighted(0, 0.7) + weighted(1, 0.7)) / 2
    assert float(loss_of(margin=0.9, fall=0.05, weight_margin=0.7).detach()) == pytest.approx(both, abs=1e-8)
    second = loss_of(fall=0.05)  # H < 0.5 ln 2
    assert float(second.detach()) == pytest.approx(weighted(1, 0.4), abs=1e-8)
    assert loss_of() is None


def test_weights_are_constants() -> None:
    """d(w H)/dp_k = w dH/dp_k, with dH/dp_k = -s_k (log s_k + H)."""
    x = X.clone().requires_grad_()
    loss_of(x, margin=0.9).backward()
    h = entropy(PROBS[0])
    factor = math.exp(0.4 * math.log(2) - h) + math.exp(0.25)
    assert x.grad[0].tolist() == pytest.approx([-factor * s * (math.log(s) + h) for s in PROBS[0]], abs=1e-8)
    assert not x.grad[1:].any()


def patches(image: Tensor, k: int) -> list[tuple[float, ...]]:
    """Each patch as its values, in a fixed order of patches."""
    height, width = image.shape[1] // k, image.shape[2] // k
    return sorted(
        tuple(image[:, i * height : (i + 1) * height, j * width : (j + 1) * width].flatten().tolist())
        for i in range(k)
        for j in range(k)
    )


def test_patches_change_places_whole() -> None:
    torch.manual_seed(0)
    x = torch.arange(5 * 3 * 8 * 12.0).reshape(5, 3, 8, 12)
    y = shuffle_patches(x, 4)
    assert all(patches(a, 4) == patches(b, 4) for a, b in zip(x, y, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(x, y, strict=True))
    orders = {tuple((b[0] - a[0, 0, 0]).flatten().tolist()) for a, b in zip(x, y, strict=True)}
    assert len(orders) == 5  # each image in an order of its own


def test_sizes_that_do_not_divide_come_back() -> None:
    assert shuffle_patches(torch.rand(2, 3, 17, 10), 4).shape == (2, 3, 17, 10)
    assert shuffle_patches(torch.rand(2, 1, 3, 2), 4).shape == (2, 1, 3, 2)
    torch.testing.assert_close(shuffle_patches(torch.full((1, 1, 7, 9), 2.5), 4), torch.full((1, 1, 7, 9), 2.5))


def test_what_the_shuffled_pass_answers() -> None:
    """A model of one pixel's place: the predicted class falls where the bright pixel moves away from it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2, bias=False)).double()
    model[1].weight.data = torch.zeros(2, 16, dtype=torch.float64)
    model[1].weight.data[0, 0] = 1.0
    x = torch.zeros(40, 1, 4, 4, dtype=torch.float64)
    x[:, 0, 0, 0] = 3.0
    adapter = trueup.adapt(model, "deyo", params="all", example=x)
    out = adapter.method.forward(adapter.net, x, adapter.state)
    assert out.logits[:, 0].tolist() == [3.0] * 40
    answers = out.memo["shuffled"].logits[:, 0].tolist()
    assert set(answers) <= {0.0, 3.0}
    assert 0.0 in answers
    assert not out.memo["shuffled"].logits.requires_grad


def test_images_that_look_the_same_shuffled_teach_nothing() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "deyo", lr=0.1, margin=1.0, norm="source")
    flat = images(16, seed=0)[0].mean(dim=(2, 3), keepdim=True).expand(-1, -1, 16, 16)
    adapter(flat)
    assert adapter.updates == 0
    assert all(torch.equal(p, q) for p, q in zip(adapter.net.model.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("norm", ["ema", "instance"])
def test_shuffled_images_move_no_statistics(norm: str) -> None:
    x = images(16, seed=0, shift=1.0)[0]
    adapter, plain = (trueup.adapt(convnet(), name, norm=norm) for name in ("deyo", "bn"))
    adapter(x)
    plain(x)
    for mine, theirs in zip(adapter.net.model.buffers(), plain.net.model.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_last_layers_stay_and_gradients_do_not_add_up() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "deyo", lr=0.1, margin=1.0, fall=0.0)
    for s in range(3):
        adapter(images(16, seed=s, shift=1.0)[0])
        assert all(p.grad is None for p in adapter.net.model.parameters())
    assert adapter.updates == 3
    assert torch.equal(adapter.net.model.bn1.weight, model.bn1.weight)
    assert not torch.equal(adapter.net.model.bn0.weight, model.bn0.weight)
    assert adapter.optimizer.param_groups[0]["momentum"] == 0.9


def test_several_labels() -> None:
    adapter = trueup.adapt(convnet(), "deyo", multilabel=True, margin=1.0, fall=0.0, lr=0.1)
    assert adapter(images(16, seed=0, shift=1.0)[0]).shape == (16, 6)
    assert adapter.updates == 1


def test_what_is_no_image_is_refused_before_anything_changes() -> None:
    adapter = trueup.adapt(identity_head(), "deyo", params="all")
    with pytest.raises(ValueError, match="patches of images"):
        adapter(torch.tensor(ROWS, dtype=torch.float64))
    assert adapter.batches == 0


@pytest.mark.parametrize(
    "bad",
    [{"margin": -1}, {"weight_margin": -1}, {"fall": 2}, {"patches": 0}, {"spared": 2}, {"momentum": 2}],
    ids=str,
)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        trueup.adapt(identity_head(), "deyo", **bad)
