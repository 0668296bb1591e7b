import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.memory.image_buffer import LowEntropyBuffer
from trueup.testing import convnet, images


def small_model(classes: int = 3) -> nn.Sequential:
    """Images (N, 1, 3, 4) to logits, with one BatchNorm layer, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, classes)
        return nn.Sequential(nn.Flatten(), *layers).double().eval()


def pictures(n: int, seed: int) -> Tensor:
    return 2 * torch.randn(n, 1, 3, 4, generator=torch.Generator().manual_seed(seed)).double()


class ByHand:
    """The paper's procedure, image by image, with BatchNorm spelt out."""

    def __init__(self, model: nn.Sequential, per_class: int, k: int) -> None:
        self.model, self.per_class, self.k = model, per_class, k
        self.gamma = model[2].weight.detach().clone().requires_grad_()
        self.beta = model[2].bias.detach().clone().requires_grad_()
        self.adam = torch.optim.Adam([self.gamma, self.beta], lr=1e-3)
        self.kept: list[tuple[Tensor, int, float]] = []

    def features(self, x: Tensor) -> Tensor:
        hidden = self.model[1](x.flatten(1)).detach()
        mean = hidden.sum(dim=0) / len(x)
        variance = ((hidden - mean) ** 2).sum(dim=0) / len(x)
        return torch.tanh(self.gamma * (hidden - mean) / (variance + 1e-5).sqrt() + self.beta)

    def enters(self, x: Tensor) -> None:
        """With the statistics of the batch alone."""
        for image, row in zip(x, self.model[4](self.features(x)).detach(), strict=True):
            s = row.softmax(dim=0)
            self.kept.append((image, int(s.argmax()), float(-(s * s.log()).sum())))
        classes = [sorted((s for s in self.kept if s[1] == c), key=lambda s: s[2]) for c in range(3)]
        self.kept = [s for mine in classes for s in mine[: self.per_class]]

    def step(self, x: Tensor) -> Tensor:
        z = self.features(torch.cat((x, torch.stack([s[0] for s in self.kept]))))
        z, supports = z[: len(x)], z[len(x) :]

        def logits(feature: Tensor) -> Tensor:
            each = []
            for c in range(3):
                mine = [s for s, kept in zip(supports, self.kept, strict=True) if kept[1] == c]
                mean = sum(mine) / max(1, len(mine))
                each.append(
                    10 * feature @ mean / (feature.norm() * mean.norm()) if mine else torch.tensor(0.0).double()
                )
            return torch.stack(each)

        answer, loss = [], torch.tensor(0.0).double()
        for row in z:
            far = [-float((row @ s / (row.norm() * s.norm())).detach()) for s in supports]
            near = sorted(range(len(far)), key=far.__getitem__)[: self.k]
            theirs = [logits(supports[j]).detach() for j in near]
            answer.append(sum(p.softmax(dim=0) for p in theirs) / len(near))
            target = sum(torch.eye(3).double()[p.argmax()] for p in theirs) / len(near)
            log_s = logits(row).log_softmax(dim=0)
            loss = loss + sum(t * (t.log() - q) for t, q in zip(target, log_s, strict=True) if t > 0) / (3 * len(z))
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return torch.stack(answer).log()


@pytest.mark.parametrize("steps", [1, 3])
def test_stream_by_hand(steps: int) -> None:
    """Which images are kept, answers from before the step, and each update of the affine parameters."""
    model = small_model()
    adapter = trueup.adapt(model, "tast-bn", per_class=3, neighbors=2, steps=steps)
    expected = ByHand(model, per_class=3, k=2)
    for seed in (1, 2, 3):
        x = pictures(6, seed)
        expected.enters(x)
        answers = [expected.step(x) for _ in range(steps)]
        torch.testing.assert_close(adapter(x), answers[0], rtol=0, atol=1e-8)
        torch.testing.assert_close(adapter.net.model[2].weight.detach(), expected.gamma.detach(), rtol=0, atol=1e-8)
        torch.testing.assert_close(adapter.net.model[2].bias.detach(), expected.beta.detach(), rtol=0, atol=1e-8)
    assert sorted(adapter.state.read().flatten(1).tolist()) == sorted(s[0].flatten().tolist() for s in expected.kept)
    assert adapter.updates == 3 * steps


def offered(memory: LowEntropyBuffer, n: int, classes: int, seed: int) -> list[tuple[float, int, int]]:
    """Offer random images with many equal entropies; returns (entropy, class, pixel) of each."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    entropy = torch.randint(8, (n,), generator=g).double() / 8
    pixels = 1000 * seed + torch.arange(n)
    memory.add(pixels.double().view(n, 1, 1, 1), labels, entropy)
    return list(zip(entropy.tolist(), labels.tolist(), pixels.tolist(), strict=True))


@pytest.mark.parametrize(("capacity", "classes"), [(12, 3), (12, 5), (6, 6), (4, 9)], ids=str)
def test_memory_keeps_the_most_certain_of_each_class(capacity: int, classes: int) -> None:
    """As a list of all images would; with fewer places than classes, the most certain of the classes' best."""
    memory, kept = LowEntropyBuffer(capacity, classes, torch.empty(0).double()), []
    for seed in range(1, 9):
        kept += offered(memory, 7, classes, seed)
        best = [sorted((h, p) for h, c, p in kept if c == k)[: max(1, capacity // classes)] for k in range(classes)]
        expected = sorted((h, k) for k in range(classes) for h, _ in best[k])[:capacity]
        held = memory.labels >= 0
        found = list(zip(memory.entropy[held].tolist(), memory.labels[held].tolist(), strict=True))
        assert sorted(h for h, _ in found) == [h for h, _ in expected]
        assert capacity < classes or sorted(found) == expected
        every = {p: (h, c) for h, c, p in kept}
        assert [every[int(p)] for p in memory.read().flatten()] == found  # image, class and entropy belong together
        memory.verify()


def test_of_equals_the_one_that_is_kept_stays() -> None:
    memory = LowEntropyBuffer(2, 2, torch.empty(0).double())
    for pixel in range(4):
        x = torch.full((2, 1, 1, 1), float(pixel)).double()
        memory.add(x, torch.tensor([0, 1]), torch.tensor([0.5, 0.5 - (pixel == 2) / 4]).double())
    assert sorted(memory.read().flatten().tolist()) == [0.0, 2.0]


@pytest.mark.parametrize(
    ("classes", "hyper", "places"),
    [(6, {}, 120), (6, {"per_class": 50}, 150), (7, {"per_class": 50}, 147), (200, {}, 150), (6, {"capacity": 12}, 12)],
    ids=str,
)
def test_memory_is_bounded(classes: int, hyper: dict, places: int) -> None:
    """20 of each class; a hundred and fifty in all, the same for each class, and one where there are more classes."""
    adapter = trueup.adapt(small_model(classes), "tast-bn", example=pictures(2, 0), **hyper)
    assert adapter.state.per_class == max(1, places // classes)
    for seed in range(3):
        adapter(pictures(100, seed))
    held = adapter.state.labels[adapter.state.labels >= 0]
    assert len(held) <= places
    assert int(held.bincount().max()) == adapter.state.per_class


def test_no_more_neighbours_than_kept_images_of_a_class() -> None:
    few, capped = (trueup.adapt(small_model(), "tast-bn", capacity=6, neighbors=k) for k in (2, 8))
    for seed in (1, 2):
        assert torch.equal(few(pictures(9, seed)), capped(pictures(9, seed)))


def test_the_memory_starts_empty() -> None:
    """The first image has itself alone as a neighbour; before it there is none, and the network answers."""
    x = images(5, seed=0)[0]
    adapter = trueup.adapt(convnet(), "tast-bn", example=x)
    assert adapter.state.labels.tolist() == [-1] * 120
    out = adapter.net(x)
    answer = adapter.method.predict(adapter.net, out, adapter.state)
    torch.testing.assert_close(answer, out.logits.log_softmax(dim=1))
    answer, expected = adapter(x[:1]), torch.zeros(6)
    expected[int(adapter.state.labels.max())] = 10.0
    torch.testing.assert_close(answer[0], expected.log_softmax(dim=0))


def test_without_learning_the_memory_answers() -> None:
    """As when a guard has frozen the adapter: nothing enters, and answers are as before a step."""
    adapter, twin = (trueup.adapt(convnet(), "tast-bn", lr=0.0) for _ in range(2))
    x = images(24, seed=0, shift=1.0)[0]
    adapter(x)
    before = {n: t.clone() for n, t in adapter.state.named_buffers()}
    with torch.no_grad():
        answer = adapter.method.predict(adapter.net, adapter.net(x), adapter.state)
    assert all(torch.equal(t, before[n]) for n, t in adapter.state.named_buffers())
    torch.testing.assert_close(answer, twin(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("params", ["norm", "backbone", "all"])
def test_only_selected_change(params: str) -> None:
    """The loss does not see the head; whatever else is selected learns."""
    model = convnet()
    adapter = trueup.adapt(model, "tast-bn", params=params)
    adapter(images(24, seed=0, shift=1.0)[0])
    changed = {n for n, p in adapter.net.model.named_parameters() if not torch.equal(p, model.get_parameter(n))}
    norms = {f"bn{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}
    assert changed == (norms if params == "norm" else norms | {"conv0.weight", "conv1.weight"})


def test_images_are_copies_and_reset_forgets_them() -> None:
    adapter, x = trueup.adapt(convnet(), "tast-bn"), images(8, seed=0)[0]
    adapter(x)
    kept = adapter.state.read().clone()
    x.zero_()
    assert len(kept) == 8
    assert torch.equal(adapter.state.read(), kept)
    adapter.reset()
    assert not adapter.state.pixels.any()
    assert int(adapter.state.labels.max()) == -1


def test_images_of_another_size_are_refused_and_change_nothing() -> None:
    adapter = trueup.adapt(convnet(), "tast-bn", norm="ema")
    adapter(images(5, seed=0)[0])
    before = {n: t.clone() for n, t in adapter.named_buffers()}
    with pytest.raises(ValueError, match=r"shape \(3, 16, 16\), these have \(3, 20, 20\)"):
        adapter(torch.zeros(4, 3, 20, 20))
    assert all(torch.equal(t, before[n]) for n, t in adapter.named_buffers())


def test_a_damaged_memory_is_refused() -> None:
    memory = LowEntropyBuffer(4, 2, torch.empty(0))
    memory.verify()
    memory.entropy = memory.entropy[:3]
    with pytest.raises(ValueError, match="entropies"):
        memory.verify()


@pytest.mark.parametrize("bad", [{"per_class": 0}, {"per_class": None}, {"neighbors": 0}, {"capacity": 0}], ids=str)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        trueup.adapt(small_model(), "tast-bn", **bad)
