"""Robust statistics, against loops written by hand in float64."""

import contextlib
import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup.norm import make_policy
from trueup.norm.robust import ANCHOR, LEAST, RATE, Rows, inlier_rows
from trueup.testing import convnet, images, patchnet, scenes, segnet
from trueup.testing.case import difference, frozen_tensors, play, same

XS = [images(n, seed=40 + i, shift=1.0)[0] for i, n in enumerate((24, 1, 7, 32, 24))]
Moments = tuple[list[float], list[float]]


def rows_of(activations: Tensor) -> list[Moments]:
    """Mean and variance of each image and channel, summed by hand."""
    rows = []
    for image in activations.detach().double():
        values = [channel.flatten().tolist() for channel in image]
        means = [math.fsum(v) / len(v) for v in values]
        pairs = zip(values, means, strict=True)
        rows.append((means, [math.fsum((a - m) ** 2 for a in v) / len(v) for v, m in pairs]))
    return rows


def clipped(row: Moments, old: Moments) -> Moments:
    """No mean farther than four deviations of what was, no variance above sixteen times it."""
    usual = math.fsum(old[1]) / len(old[1])
    spread = [max(v, usual) for v in old[1]]
    near = [(m - 4 * math.sqrt(s), m + 4 * math.sqrt(s)) for m, s in zip(old[0], spread, strict=True)]
    means = [min(max(m, low), high) for m, (low, high) in zip(row[0], near, strict=True)]
    return means, [min(v, 16 * s) for v, s in zip(row[1], spread, strict=True)]


def moved(old: Moments, source: Moments, rows: list[Moments], weights: list[float]) -> Moments:
    """The mixture of what was, the source and the images: its mean, and its variance by the law of total variance."""
    total = math.fsum(weights)
    rate = 1 - (1 - RATE) ** total
    rows = [clipped(row, old) for row in rows]
    parts = [(1 - rate, *old), (rate * ANCHOR, *source)]
    parts += [(rate * (1 - ANCHOR) * w / total, *row) for w, row in zip(weights, rows, strict=True)]
    means, variances = [], []
    for c in range(len(old[0])):
        mean = math.fsum(share * m[c] for share, m, _ in parts)
        within = math.fsum(share * v[c] for share, _, v in parts)
        means.append(mean)
        variances.append(within + math.fsum(share * (m[c] - mean) ** 2 for share, m, _ in parts))
    return means, variances


class ByHand:
    """The tiny convolutional networks with robust statistics, in float64."""

    def __init__(self, model: nn.Module, *, classes: int | None) -> None:
        self.model = copy.deepcopy(model).double()
        self.source = [self._buffers(i) for i in (0, 1)]
        self.now = list(self.source)
        self.shares = [1 / classes] * classes if classes else []

    def _buffers(self, i: int) -> Moments:
        layer = self.model.get_submodule(f"bn{i}")
        return layer.running_mean.tolist(), layer.running_var.tolist()

    def answer(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        seen, h = [], x.double()
        for i in (0, 1):
            layer = self.model.get_submodule(f"bn{i}")
            h = F.conv2d(h, self.model.get_parameter(f"conv{i}.weight"), stride=2, padding=1)
            seen.append(h)
            mean, variance = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in self.now[i])
            h = (h - mean) / (variance + layer.eps).sqrt()
            h = (h * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)).relu()
        weight, bias = self.model.get_parameter("head.weight"), self.model.get_parameter("head.bias")
        if weight.ndim == 2:
            return F.linear(h.mean(dim=(2, 3)), weight, bias).detach(), seen
        return F.interpolate(F.conv2d(h, weight, bias), scale_factor=4, mode="bilinear").detach(), seen

    def see(self, x: Tensor) -> Tensor:
        logits, seen = self.answer(x)
        weights = [1.0] * len(x)
        if self.shares:
            classes, n = logits.argmax(dim=1).tolist(), len(x)
            kept = (1 - 1 / 64) ** n
            self.shares = [kept * f + (1 - kept) * classes.count(k) / n for k, f in enumerate(self.shares)]
            weights = [min(1.0, 1 / (len(self.shares) * self.shares[k])) for k in classes]
        for i in (0, 1):
            self.now[i] = moved(self.now[i], self.source[i], rows_of(seen[i]), weights)
        return logits


def check_estimates(adapter: trueup.Adapter, hand: ByHand, **tolerance: float) -> None:
    for i in (0, 1):
        layer = adapter.net.model.get_submodule(f"bn{i}")
        for mine, theirs in zip((layer.running_mean, layer.running_var), hand.now[i], strict=True):
            torch.testing.assert_close(mine.double(), torch.tensor(theirs, dtype=torch.float64), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_estimates_are_those_of_a_loop(dtype: torch.dtype) -> None:
    adapter, hand = trueup.adapt(convnet().to(dtype), "bn", norm="robust"), ByHand(convnet(), classes=6)
    x, y = images(200, seed=3, shift=1.0)
    exact = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for batch in (*XS, x[y == 2], x[y == 2][:5]):  # a run of one class weighs less
        torch.testing.assert_close(adapter(batch.to(dtype)).double(), hand.see(batch), **exact)
        check_estimates(adapter, hand, **exact)
    assert min(1 / (6 * f) for f in hand.shares) < 0.6
    torch.testing.assert_close(adapter.net.policy.shares.double(), torch.tensor(hand.shares).double())


@pytest.mark.parametrize("multilabel", [False, True])
def test_every_image_of_a_segmenter_or_with_labels_weighs_one(multilabel: bool) -> None:
    model = segnet(multilabel=multilabel).double()
    adapter, hand = trueup.adapt(model, "bn", norm="robust", multilabel=multilabel), ByHand(model, classes=None)
    for i, n in enumerate((5, 1, 8)):
        x = scenes(n, seed=i, shift=1.0)[0].double()
        torch.testing.assert_close(adapter(x), hand.see(x), rtol=1e-9, atol=1e-9)
        check_estimates(adapter, hand, rtol=1e-9, atol=1e-12)
    assert adapter.net.policy.shares.numel() == 0


def test_every_image_with_labels_weighs_one() -> None:
    adapter, hand = (
        trueup.adapt(convnet().double(), "bn", norm="robust", multilabel=True),
        ByHand(convnet(), classes=None),
    )
    for x in XS:
        adapter(x.double())
        hand.see(x)
    check_estimates(adapter, hand, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.BatchNorm1d(5), (5,)), (nn.BatchNorm1d(5), (5, 4)), (nn.BatchNorm3d(5), (5, 2, 3, 2))],
)
def test_layers_of_other_dimensions(layer: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer.running_var.uniform_(0.5, 2)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(math.prod(shape), 3)).double().eval()
    adapter = trueup.adapt(model, "bn", norm="robust", multilabel=True)
    source = now = (layer.running_mean.tolist(), layer.running_var.tolist())
    for n in (9, 1, 4):
        x = 3 * torch.randn(n, *shape, dtype=torch.float64) + 1
        adapter(x)
        now = moved(now, source, rows_of(x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)), [1.0] * n)
    for mine, theirs in zip((adapter.net.model[0].running_mean, adapter.net.model[0].running_var), now, strict=True):
        torch.testing.assert_close(mine, torch.tensor(theirs, dtype=torch.float64))


def test_an_answer_does_not_depend_on_batch_mates() -> None:
    adapter = trueup.adapt(convnet(), "tent", norm="robust", lr=1e-2)
    play(adapter, XS)
    x = images(32, seed=9, shift=1.0)[0]
    together = copy.deepcopy(adapter)(x)
    alone = torch.cat([copy.deepcopy(adapter)(row) for row in x.split(1)])
    torch.testing.assert_close(alone, together, rtol=1e-6, atol=1e-5)
    wild = x.clone()
    wild[1:] = 100 * torch.randn_like(wild[1:])
    torch.testing.assert_close(copy.deepcopy(adapter)(wild)[0], together[0], rtol=1e-6, atol=1e-5)


def test_reading_and_further_passes_change_nothing() -> None:
    adapter = trueup.adapt(convnet(), "tent", norm="robust")
    play(adapter, XS[:3])
    before = copy.deepcopy(adapter)
    with torch.no_grad(), adapter.net.frozen_statistics():
        adapter.net(XS[3], update=True)
        adapter.net.update_estimates()
    with torch.no_grad():
        adapter.net(XS[3])
        adapter.net.update_estimates()
    assert difference(before, adapter) == []
    one, three = (trueup.adapt(convnet(), "tent", norm="robust", steps=n, lr=0.0) for n in (1, 3))
    play(one, XS)
    play(three, XS)
    assert same(list(one.net.buffers()), list(three.net.buffers()))


@pytest.mark.parametrize("method", ["bn", "tent", "tsd", "t3a"])
def test_reset_save_load_and_deepcopy_are_exact(method: str, tmp_path: Path) -> None:
    adapter, fresh = (trueup.adapt(convnet(), method, norm="robust", example=XS[0]) for _ in range(2))
    play(adapter, XS[:4])
    adapter.save(tmp_path / "state")
    later = trueup.adapt(convnet(), method, norm="robust")
    later.load(tmp_path / "state")
    twin = copy.deepcopy(adapter)
    assert difference(adapter, later) == difference(adapter, twin) == []
    rest = [XS[4], XS[1], XS[0]]
    expected = play(adapter, rest)
    assert same(expected, play(later, rest))
    assert same(expected, play(twin, rest))
    assert difference(adapter, later) == difference(adapter, twin) == []
    adapter.reset()
    assert difference(fresh, adapter) == []
    assert same(play(adapter, XS), play(fresh, XS))


def loss_by_hand(method: str, logits: Tensor) -> Tensor:
    p = logits.softmax(dim=1)
    loss = -(p * p.log()).sum(dim=1).mean()
    return loss if method == "tent" else loss + (p.mean(dim=0) * p.mean(dim=0).log()).sum()


@pytest.mark.parametrize("method", ["tent", "shot-im"])
def test_learning_is_a_second_pass_with_statistics_of_the_batch(method: str) -> None:
    model, x = convnet().double(), XS[3].double()
    adapter = trueup.adapt(model, method, norm="robust", lr=1e-2)
    with torch.no_grad():
        torch.testing.assert_close(adapter(x), model(x))
    hand = copy.deepcopy(model)
    for layer in (hand.bn0, hand.bn1):
        layer.train()
    chosen = [p for n, p in hand.named_parameters() if ("bn" in n if method == "tent" else "head" not in n)]
    optimizer = torch.optim.Adam(chosen, lr=1e-2)
    loss_by_hand(method, hand(x)).backward()
    optimizer.step()
    for mine, theirs in zip(adapter.net.model.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
    assert not torch.equal(adapter.net.model.bn0.weight, model.bn0.weight)
    statistics = ByHand(convnet(), classes=6)  # the estimates are of the first pass, with the weights before the step
    statistics.see(x)
    check_estimates(adapter, statistics, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["tent", "tsd", "pl", "shot-im", "eta"])
def test_few_images_move_the_estimates_and_teach_nothing(method: str) -> None:
    adapter = trueup.adapt(convnet(), method, norm="robust", lr=1e-2, example=XS[0])
    state = [t.clone() for t in (*adapter.net.parameters(), *adapter.state.parameters(), *adapter.state.buffers())]
    mean = adapter.net.model.bn0.running_mean.clone()
    adapter(images(LEAST - 1, seed=5, shift=1.0)[0])
    now = [*adapter.net.parameters(), *adapter.state.parameters(), *adapter.state.buffers()]
    assert same(state, now)
    assert adapter.updates == 0
    assert not torch.equal(adapter.net.model.bn0.running_mean, mean)
    if method in ("tent", "tsd", "shot-im"):
        adapter(images(LEAST, seed=5, shift=1.0)[0])
        assert adapter.updates == 1


@pytest.mark.parametrize("method", ["tent", "tsd", "t3a", "eta"])
def test_without_batchnorm_it_is_as_with_batch(method: str) -> None:
    robust, batch = (trueup.adapt(patchnet(), method, norm=norm) for norm in ("robust", "batch"))
    assert same(play(robust, XS), play(batch, XS))
    assert same([*robust.state.buffers()], [*batch.state.buffers()])
    assert same(list(robust.net.model.parameters()), list(batch.net.model.parameters()))


class Bounded(nn.Module):
    """Its answers are finite even where the variance of what its BatchNorm layer sees is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bn, self.head = nn.BatchNorm2d(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(x * x * x).tanh().mean(dim=(2, 3)))


HUGE = 1e9 * torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", ["bn", "t3a", "tent"])
def test_statistics_that_are_not_finite_move_nothing(method: str) -> None:
    model = Bounded().eval()
    adapter = trueup.adapt(model, method, norm="robust")
    play(adapter, [x[:, :, :4, :4] for x in XS[:2]])
    before = copy.deepcopy(adapter)
    with contextlib.suppress(ValueError):  # of the second pass of a method that learns
        assert adapter(HUGE).isfinite().all()
    ours, theirs = (dict(a.net.named_buffers()) for a in (adapter, before))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_a_model_that_folds_views_into_the_batch() -> None:
    """A BatchNorm layer may see several rows of one image, as with crops, frames or patches."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.head = nn.BatchNorm2d(3), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            views = self.bn(torch.stack((x, x.flip(3)), dim=1).flatten(0, 1))
            return self.head(views.mean(dim=(2, 3)).view(-1, 2, 3).mean(dim=1))

    adapter = trueup.adapt(Views().eval(), "bn", norm="robust")
    assert adapter(XS[0]).shape == (24, 4)
    assert adapter(XS[1]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["bn", "source", "lame", "t3a"])
def test_low_precision(method: str, dtype: torch.dtype) -> None:
    adapter = trueup.adapt(convnet().to(dtype), method, norm="robust")
    full = trueup.adapt(convnet(), method, norm="robust")
    for x in XS:
        answer = adapter(x.to(dtype))
        assert answer.dtype == torch.float32
        torch.testing.assert_close(answer, full(x), rtol=0.2, atol=0.5)
    assert all(t.isfinite().all() for t in frozen_tensors(adapter))
    adapter.reset()
    assert adapter(XS[0].to(dtype)).isfinite().all()


def test_low_precision_activations_whose_variance_is_beyond_its_range() -> None:
    """Activations of 1,000 are fine in half precision, their variance of a million is not a half."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)).eval().half()
    model[0].running_var.fill_(60_000)
    adapter = trueup.adapt(model, "bn", norm="robust")
    x = (200 * torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))).half()
    x[0] *= 2
    assert adapter(x).isfinite().all()
    assert all(b.isfinite().all() for b in adapter.net.buffers())


@pytest.mark.parametrize("method", ["bn", "tent", "t3a"])
def test_episodic(method: str) -> None:
    hyper: dict[str, Any] = {"norm": "robust", "episodic": True}
    adapter = trueup.adapt(convnet(), method, **hyper)
    fresh = trueup.adapt(convnet(), method, example=XS[0], **hyper)
    for x in XS:
        answer = adapter(x)
        assert torch.equal(answer, trueup.adapt(convnet(), method, norm="robust")(x))
        # The random stream is at its seed, or not begun: the same. What was seen is counted all the same.
        assert set(difference(fresh, adapter)) <= {"random/cpu", "batches", "images", "updates"}


# Images that are set aside


def far_by_hand(rows: dict[nn.Module, tuple[Tensor, Tensor]]) -> list[bool]:
    """The rule written out, image by image."""
    near = [True] * len(next(iter(rows.values()))[0])
    for mean, variance in rows.values():
        mean, variance = mean.double().numpy(), variance.double().numpy()
        spread = variance.mean(axis=0) + 1e-5
        middle = np.sort(mean, axis=0)[(len(mean) - 1) // 2]  # torch takes the lower of two in the middle
        scores = [
            [float(np.mean(np.abs(m - middle) / np.sqrt(spread))) for m in mean],
            [float(np.mean(np.abs(np.log((v + 1e-5) / spread)))) for v in variance],
        ]
        for score in scores:
            median = sorted(score)[(len(score) - 1) // 2]
            deviation = sorted(abs(s - median) for s in score)[(len(score) - 1) // 2]
            near = [n and s - median <= 9 * max(deviation, 0.01) for n, s in zip(near, score, strict=True)]
    return near


def moments_of(model: nn.Module, x: Tensor) -> Rows:
    """The moments of each image at each layer, as the policy notes them."""
    policy = make_policy("robust")
    with torch.no_grad(), policy.forward_pass(model, update=True):
        model(x)
        return dict(policy.seen or {})


@pytest.mark.parametrize("seed", range(4))
def test_what_is_set_aside(seed: int) -> None:
    model = convnet()
    x = images(24, seed=300 + seed, shift=1.0)[0]
    x[[2, 9]] *= 30
    x[5] += 20
    rows = moments_of(model, x)
    found = inlier_rows(rows, len(x)).tolist()
    assert found == far_by_hand(rows)
    assert not any(found[i] for i in (2, 5, 9))
    assert sum(found) >= len(x) - 4
    assert inlier_rows(moments_of(model, x[:15]), 15).all()  # too few to tell


@pytest.mark.parametrize("method", ["bn", "tent", "tsd"])
def test_nothing_is_learnt_from_what_is_set_aside(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a twin that never sees it, and that sets nothing aside itself."""
    adapter, twin = (trueup.adapt(convnet(), method, norm="robust", example=XS[0]) for _ in range(2))
    for i in range(3):
        x = images(24, seed=310 + i, shift=1.0)[0]
        x[[2, 9]] *= 30
        fit = inlier_rows(moments_of(twin.net.model, x), len(x))
        answer = adapter(x)
        with monkeypatch.context() as patch:
            patch.setattr(trueup.norm.robust, "inlier_rows", lambda rows, n: torch.ones(n, dtype=torch.bool))
            torch.testing.assert_close(answer[fit], twin(x[fit]), rtol=1e-5, atol=1e-5)
    ours, theirs = (dict(a.net.state_dict()) for a in (adapter, twin))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 8, 15])
@pytest.mark.parametrize("times", [15, 150, 900])
def test_one_glaring_image_does_not_swamp_the_estimates(n: int, times: float) -> None:
    """Too few images to set it aside, too dim to be kept out: it pulls no harder than any other may."""
    adapter, right = trueup.adapt(convnet(), "tent", preset="safe"), []
    for i in range(20 + 120 // n):
        x, y = images(n, seed=900 + i, shift=1.0)
        if i == 20:
            x[0] *= times
        answer = adapter(x)
        if i > 20:
            right += (answer.argmax(dim=1) == y).tolist()
    assert sum(right) / len(right) > 0.75
