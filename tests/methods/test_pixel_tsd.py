"""Pixel TSD equals a transcription that loops over pixels, samples as it says, and keeps its memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup.memory.pixel_bank import PixelBank
from trueup.methods.pixel_tsd import PixelTsd
from trueup.testing import scenes, segnet

EVERY = {"samples": 10_000, "queries": 10_000, "capacity": 2048}  # nothing is left to chance


class Loops:
    """The method once more, pixel by pixel in Python: every pixel enters the bank, every pixel is a query."""

    def __init__(self, rows: Tensor, bias: Tensor, *, k: int, lam: float, consistency: bool, balanced: bool, per_class):
        self.k, self.lam, self.consistency, self.balanced, self.per_class = k, lam, consistency, balanced, per_class
        self.bank: list[list[tuple]] = [
            [] for _ in rows
        ]  # of each class (unit feature, probabilities, entropy, weight)
        for c, w in enumerate(rows):
            s = softmax((rows @ w + bias).tolist())
            self.bank[c].append((unit(w), s, ent(s), 1e-6))

    def prototype(self, c: int) -> Tensor:
        entries = self.bank[c]
        if self.per_class == "half":
            entries = sorted(entries, key=lambda e: e[2])[: math.ceil(len(entries) / 2)]
        return unit(sum(e[0] for e in entries) / len(entries))

    def loss(self, z: Tensor, p: Tensor) -> Tensor:
        """z (N, D, P), p (N, C, P), both with gradient."""
        pixels = [(z[i, :, j], p[i, :, j]) for i in range(len(z)) for j in range(z.shape[2])]
        label = [int(q.detach().argmax()) for _, q in pixels]
        for (feature, q), c in zip(pixels, label, strict=True):
            s = softmax(q.tolist())
            self.bank[c].append(
                (unit(feature.detach()), s, ent(s), 1.0)
            )  # all of them enter, so each stands for itself
        if isinstance(self.per_class, int):
            for c, entries in enumerate(self.bank):
                self.bank[c] = sorted(entries, key=lambda e: e[2])[: self.per_class]
        prototypes = [self.prototype(c) for c in range(len(self.bank))]
        top, bottom = torch.zeros((), dtype=z.dtype), 0.0
        for (feature, q), c in zip(pixels, label, strict=True):
            u = torch.stack([feature @ proto / feature.norm() for proto in prototypes])
            if self.consistency and int(u.detach().argmax()) != c:
                continue
            weight = 1 / label.count(c) if self.balanced else 1.0
            target = softmax(q.tolist())
            top = top - weight * sum(t * v for t, v in zip(target, u - torch.logsumexp(u, dim=0), strict=True))
            bottom += weight
        total = top / bottom
        entries = [e for part in self.bank for e in part]
        far = torch.zeros((), dtype=z.dtype)
        for feature, q in pixels:
            near = sorted(entries, key=lambda e: -float(e[0] @ unit(feature.detach())))[: self.k]
            mean = sum(e[3] for e in near) / len(near)
            s = torch.exp(q - torch.logsumexp(q, dim=0))
            for e in near:
                similarity = float(e[0] @ unit(feature.detach()))
                gap = sum((a - b) ** 2 for a, b in zip(s, e[1], strict=True))
                far = far + similarity * e[3] / mean * gap / len(near)
        return total + self.lam * far / len(pixels)


def softmax(p: list[float]) -> list[float]:
    top = max(p)
    e = [math.exp(v - top) for v in p]
    return [v / sum(e) for v in e]


def ent(s: list[float]) -> float:
    return -sum(v * math.log(v) for v in s)


def unit(v: Tensor) -> Tensor:
    return v / v.norm()


class Tiny(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.body = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.head = nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.head(self.body(x)), scale_factor=2, mode="bilinear")


def tiny(channels: int = 3, seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    model = Tiny(channels).double()
    nn.init.normal_(model.head.weight, std=1.5)  # all classes are predicted somewhere
    return model.eval()


SETTINGS = [
    {},
    {"balanced": False},
    {"consistency": False},
    {"per_class": None},
    {"per_class": 5},
    {"neighbors": 3, "alignment": 1.0},
]


@pytest.mark.parametrize("hyper", SETTINGS, ids=str)
def test_two_batches_equal_the_loops(hyper: dict) -> None:
    model = tiny()
    full = {**({**EVERY, "capacity": 5} if hyper.get("per_class") == 5 else EVERY), "lr": 1e-3, "neighbors": 7, **hyper}
    adapter = trueup.adapt(model, PixelTsd(**full))
    loops = Loops(
        model.head.weight.detach()[:, :, 0, 0], model.head.bias.detach(), k=full["neighbors"],
        lam=full.get("alignment", 0.1), consistency=full.get("consistency", True),
        balanced=full.get("balanced", True), per_class=full.get("per_class", "half"),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for seed in (1, 2):
        x = torch.randn(2, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        answer = adapter(x)
        z = model.body(x)
        p = model.head(z)
        torch.testing.assert_close(answer, F.interpolate(p, scale_factor=2, mode="bilinear").detach())
        optimizer.zero_grad()
        loops.loss(z.flatten(2), p.flatten(2)).backward()
        optimizer.step()
        for (name, ours), theirs in zip(adapter.net.model.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def test_labels_equal_two_banks_of_two_classes() -> None:
    """Multi-label: the mean over labels of the two-class loss with logits (0, p) and rows (0, w)."""
    model = tiny(channels=2)
    adapter = trueup.adapt(model, PixelTsd(**EVERY, lr=1e-3, neighbors=7), multilabel=True)
    w, b = model.head.weight.detach()[:, :, 0, 0], model.head.bias.detach()
    loops = []
    for label in (0, 1):
        rows, bias = torch.stack((1e-300 * w[label], w[label])), torch.stack((0 * b[label], b[label]))
        loops.append(Loops(rows, bias, k=7, lam=0.1, consistency=True, balanced=True, per_class="half"))
        zero = torch.zeros_like(w[label])
        loops[-1].bank[0][0] = (zero, *loops[-1].bank[0][0][1:])  # the row of absence has no direction
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for seed in (1, 2):
        x = torch.randn(2, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        answer = adapter(x)
        assert answer.shape == (2, 2, 6, 8)
        z = model.body(x)
        p = model.head(z).flatten(2)
        torch.testing.assert_close(answer, F.interpolate(model.head(z), scale_factor=2, mode="bilinear").detach())
        two = [torch.stack((torch.zeros_like(p[:, k]), p[:, k]), dim=1) for k in (0, 1)]
        optimizer.zero_grad()
        (sum(loops[k].loss(z.flatten(2), two[k]) for k in (0, 1)) / 2).backward()
        optimizer.step()
        for ours, theirs in zip(adapter.net.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_a_sample_of_each_image_and_class_enters_and_stands_for_all() -> None:
    adapter = trueup.adapt(segnet(), PixelTsd(samples=4))
    x = scenes(5, seed=3)[0]
    adapter(x)
    ring = adapter.state
    with torch.no_grad():
        label = segnet_scores(x).argmax(dim=1).flatten(1)
    for k in range(3):
        there = ring.arrival[k] >= 0
        count = (label == k).sum(dim=1)
        assert int(there.sum()) == 1 + int(count.clamp(max=4).sum())  # and the head's row
        assert float(ring.weight[k][there].sum()) == pytest.approx(float(count.sum()), rel=1e-5)


def segnet_scores(x: Tensor) -> Tensor:
    """The scores of the tiny segmenter with batch statistics, by torch's own training mode."""
    model = segnet().train()
    return model.head(nn.Sequential(*[m for n, m in model.named_children() if n not in ("head", "up")])(x))


def test_pixels_are_drawn_alike_and_by_the_seed() -> None:
    """Each pixel of a class has the same chance, and another seed draws others."""
    model, x = tiny(), torch.randn(1, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = F.normalize(model.body(x).flatten(2)[0].T, dim=1)
        label = model.head(model.body(x)).argmax(dim=1).flatten()
    k = int(label.bincount().argmax())
    hits = torch.zeros(len(z))
    for seed in range(300):
        ring = trueup.adapt(model, PixelTsd(samples=2), seed=seed, example=x)
        ring(x)
        drawn = ring.state.features[k][ring.state.arrival[k] > 2]
        assert len(drawn) == 2
        hits += torch.cdist(drawn, z).min(dim=0).values < 1e-9
    mine = hits[label == k]
    assert hits[label != k].sum() == 0
    expected = 600 / len(mine)
    assert ((mine - expected).square() / expected).sum() < 3 * len(mine)  # chi-square, far above its mean
    assert mine.min() > 0


def test_the_bank_does_not_grow() -> None:
    adapter = trueup.adapt(segnet(), PixelTsd(capacity=64, samples=16))
    sizes = set()
    for i in range(30):
        adapter(scenes(4, seed=i, shift=1.0)[0])
        sizes.add(sum(b.numel() * b.element_size() for b in adapter.state.buffers()))
    assert len(sizes) == 1
    assert (adapter.state.arrival >= 0).all()
    assert int(adapter.state.arrival.min()) > 3  # the rows of the head have left, too


@pytest.mark.parametrize("lowest", [False, True])
def test_ring_equals_sorted_lists(lowest: bool) -> None:
    """The newest entries of each class, or those of lowest entropy and of equals the newest."""
    g = torch.Generator().manual_seed(0)
    ring = PixelBank(3, 4, 5, torch.zeros(1, dtype=torch.float64), keep_lowest=lowest)
    lists: list[list[tuple[float, int, Tensor]]] = [[], [], []]
    arrival = 0
    for n in (1, 4, 0, 20, 7):
        features = torch.randn(n, 4, generator=g, dtype=torch.float64)
        labels, entropy = torch.randint(3, (n,), generator=g), torch.randint(4, (n,), generator=g).double()
        ring.insert(features, torch.rand(n, 3, generator=g), labels, entropy, torch.ones(n))
        for z, k, h in zip(features, labels.tolist(), entropy.tolist(), strict=True):
            lists[k].append((h, -arrival, z / z.norm()))
            arrival += 1
        for k in range(3):
            lists[k] = sorted(lists[k], key=lambda e: (e[0], e[1]) if lowest else e[1])[:5]
            there = ring.arrival[k] >= 0
            assert ring.arrival[k][there].tolist() == [-e[1] for e in lists[k]]
            if lists[k]:
                torch.testing.assert_close(ring.features[k][there], torch.stack([e[2] for e in lists[k]]))
            half = sorted(lists[k], key=lambda e: (e[0], e[1]))[: math.ceil(len(lists[k]) / 2)]
            if half:
                torch.testing.assert_close(ring.prototypes(0.5)[k], torch.stack([e[2] for e in half]).mean(dim=0))


def test_neighbours_of_a_bank_with_fewer() -> None:
    ring = PixelBank(2, 2, 8, torch.zeros(1))
    ring.insert(
        torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.eye(2), torch.tensor([0, 1]), torch.zeros(2), torch.ones(2)
    )
    similarity, probs, weight = ring.neighbors(torch.tensor([[1.0, 1e-3]]), 64)
    assert similarity.shape == (1, 2)
    torch.testing.assert_close(similarity, torch.tensor([[1.0, 1e-3]]), rtol=1e-5, atol=1e-6)
    assert torch.equal(probs[0], torch.eye(2))
    assert torch.equal(weight, torch.ones(1, 2))


def test_nothing_agrees_and_nothing_is_aligned_is_no_update() -> None:
    """Where the prototypes contradict all predictions and λ = 0 there is nothing to learn."""
    model = tiny()
    adapter = trueup.adapt(model, PixelTsd(**EVERY, alignment=0.0))
    x = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    adapter(x)
    out = adapter.hooks.forward(adapter.net, x, adapter.state)
    label = out.scores.argmax(dim=1).flatten()
    away = -F.normalize(out.features.flatten(2)[0].T, dim=1)
    for k in range(3):
        mine = away[label == k]
        adapter.state.features[k] = mine.mean(dim=0) if len(mine) else 1.0
    assert adapter.hooks.loss(adapter.net, out, adapter.state) is None


def test_names_and_refusals() -> None:
    x = scenes(2, seed=0)[0]
    by_name = trueup.adapt(segnet(), "tsd", example=x)
    assert isinstance(by_name.method, PixelTsd)
    assert by_name.method.neighbors == 64
    assert trueup.adapt(segnet(), "tsd", neighbors=3, example=x).method == PixelTsd(neighbors=3)
    assert trueup.adapt(segnet(), "tsd", queries=64, example=x).method == PixelTsd(queries=64)
    with pytest.raises(ValueError, match=r"tsd for segmentation has no hyper-parameter 'variant'"):
        trueup.adapt(segnet(), "tsd", variant="released", example=x)
    with pytest.raises(ValueError, match=r"Tsd is not for segmentation: pass PixelTsd\(...\) or 'tsd'"):
        trueup.adapt(segnet(), trueup.get_method("tsd")(), example=x)
    with pytest.raises(ValueError, match="PixelTsd is not for classification"):
        trueup.adapt(nn.Linear(4, 3), PixelTsd())(torch.randn(2, 4))
    with pytest.raises(ValueError, match="lame is not for segmentation: it compares all pairs"):
        trueup.adapt(segnet(), "lame", example=x)
    with pytest.raises(ValueError, match="t3a is not for segmentation: the entropy of pixels"):
        trueup.adapt(segnet(), "t3a")(x)
    names = ["source", "bn", "tent", "pl", "shot-im", "eta", "eata", "tsd"]
    assert trueup.list_methods("segmentation")[: len(names)] == names


@pytest.mark.parametrize(
    "wrong", [{"per_class": "some"}, {"per_class": 0}, {"samples": 0}, {"queries": 1.5}, {"capacity": -1},
              {"balanced": 1}, {"alignment": -1}, {"per_class": 20, "capacity": 30}],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if len(wrong) == 1 else "keeps 20 of each class"):
        PixelTsd(**wrong)


def test_capacity_follows_per_class() -> None:
    assert PixelTsd().capacity == 1024
    assert PixelTsd(per_class=100).capacity == 100
    assert PixelTsd(**PixelTsd(per_class=100).hyperparameters()) == PixelTsd(per_class=100)


def test_a_default_that_only_pixels_have_may_be_given_by_name() -> None:
    adapter = trueup.adapt(segnet(), "tsd", per_class="half", example=scenes(2, seed=0)[0])
    assert adapter.method == PixelTsd()
    with pytest.raises(ValueError, match="per_class=0"):
        trueup.adapt(segnet(), "tsd", per_class=0)


@pytest.mark.parametrize("activation", [nn.LeakyReLU(), nn.GELU()], ids=["leaky", "gelu"])
def test_features_of_no_length_teach_nothing(activation: nn.Module) -> None:
    """A black image makes zero features; their direction is undefined, and must not become a huge gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.InstanceNorm2d(4, affine=True), activation, nn.Conv2d(4, 2, 1)
    )
    x = torch.randn(4, 1, 10, 10)
    x[1] = 0
    adapter = trueup.adapt(model, "tsd")
    adapter(x)
    squares = [s["exp_avg_sq"].max() for s in adapter.optimizer.state.values()]
    assert max(squares) < 1
    assert all(p.isfinite().all() for p in adapter.net.model.parameters())
