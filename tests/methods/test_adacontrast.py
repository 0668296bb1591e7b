import copy
import math

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.core.saving import from_file, to_file
from trueup.testing import convnet, images, patchnet
from trueup.testing.case import difference
from trueup.views import moco_view, weak_view


def two_layers(seed: int = 0) -> nn.Sequential:
    """Images (N, 3, 4, 4) to five features and three logits, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Tanh())
        return nn.Sequential(body, nn.Linear(5, 3)).double()


def pictures(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed)).double()


def length(v: Tensor) -> Tensor:
    return (v * v).sum().sqrt()


def vote(z: Tensor, bank: list[tuple[Tensor, Tensor]], k: int) -> int:
    """The class of the greatest mean probability among the k entries at the smallest angle."""
    ranked = sorted(bank, key=lambda entry: -float(z @ entry[0] / length(z) / length(entry[0])))
    return int(sum(q for _, q in ranked[:k]).argmax())


class ByHand:
    """The method written out image by image, with lists for memories, for `two_layers` and norm="source"."""

    def __init__(self, warmup: int, capacity: int, neighbors: int, crop: float) -> None:
        self.model, self.slow = two_layers(), two_layers()
        self.warmup, self.capacity, self.neighbors, self.crop = warmup, capacity, neighbors, crop
        torch.manual_seed(0)
        keys = torch.randn(capacity, 5).double()
        labels = torch.randint(3, (capacity,)).tolist()
        self.queue = [(key / length(key), label) for key, label in zip(keys, labels, strict=True)]
        self.bank: list[tuple[Tensor, Tensor]] = []
        self.labels: list[int] = []
        self.seen = 0
        self.moved: dict[str, Tensor] = {}
        torch.manual_seed(0)

    def batch(self, x: Tensor) -> Tensor:
        n = len(x)
        weak = weak_view(x)
        strong = moco_view(torch.cat([x, x]), crop=self.crop)
        with torch.no_grad():
            z, logits = self.model[0](weak), self.model(weak)
            own, key = self.slow(weak).softmax(dim=1), self.slow[0](strong[n:])
            entries = list(zip(self.slow[0](weak), own, strict=True))
        early = self.seen < self.warmup or not self.bank
        self.labels = [int(p.argmax()) for p in logits] if early else [vote(a, self.bank, self.neighbors) for a in z]
        self.step(strong[:n], key)
        self.bank = [*self.bank, *entries][-self.capacity :]
        self.queue = [*self.queue, *zip(key, self.labels, strict=True)][-self.capacity :]
        self.seen += n
        with torch.no_grad():
            return self.model(x)

    def loss(self, strong: Tensor, key: Tensor) -> Tensor:
        z = self.model[0](strong)
        s = self.model(strong).exp() / self.model(strong).exp().sum(dim=1, keepdim=True)
        total = torch.zeros(())
        for i, label in enumerate(self.labels):
            rivals = [key[i], *(k for k, other in self.queue if other != label)]
            like = [torch.exp(z[i] @ k / length(z[i]) / length(k) / 0.07) for k in rivals]
            total = total - s[i, label].log() - torch.log(like[0] / sum(like))
        mean = s.mean(dim=0)
        return total / len(strong) + (mean * (mean + 1e-8).log()).sum()

    def step(self, strong: Tensor, key: Tensor) -> None:
        """v <- 0.9 v + g, w <- w - lr (g + 0.9 v), with g the gradient and 1e-4 w; ten times so far in the head."""
        self.model.zero_grad()
        self.loss(strong, key).backward()
        with torch.no_grad():
            for (name, p), slow in zip(self.model.named_parameters(), self.slow.parameters(), strict=True):
                g = p.grad + 1e-4 * p
                v = self.moved[name] = 0.9 * self.moved[name] + g if name in self.moved else g.clone()
                p -= 0.01 * (10 if name.startswith("1.") else 1) * (g + 0.9 * v)
                slow.copy_(0.9 * slow + 0.1 * p)


@pytest.mark.parametrize(
    ("warmup", "capacity", "neighbors", "crop", "sizes"),
    [
        (8, 11, 3, 0.2, (4, 4, 4, 5, 3, 4)),
        (0, 64, 2, 1.0, (3, 3, 3)),
        (5, 4, 9, 0.5, (3, 6, 2, 3)),
        (99, 6, 3, 0.2, (3, 4)),
        (2, 4, 3, 0.2, (3, 9)),
    ],
)
def test_a_stream_by_hand(warmup: int, capacity: int, neighbors: int, crop: float, sizes: tuple[int, ...]) -> None:
    """Labels, weights, answers, slow encoder, bank and queue; the memory wraps around, once within a batch."""
    hyper = {"warmup": warmup, "capacity": capacity, "neighbors": neighbors, "crop": crop}
    adapter = trueup.adapt(two_layers(), "adacontrast", lr=0.01, momentum=0.9, **hyper)
    xs = [pictures(n, seed=i) for i, n in enumerate(sizes)]
    answers = [adapter(x) for x in xs]
    with torch.random.fork_rng(devices=[]):
        hand = ByHand(warmup, capacity, neighbors, crop)
        expected = [hand.batch(x) for x in xs]
    for answer, by_hand in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer, by_hand, rtol=0, atol=1e-8)
    state, seen = adapter.state, sum(sizes)
    for mine, theirs in ((adapter.net.model, hand.model), (state.slow.model, hand.slow)):
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-8)
    places = [i % capacity for i in range(seen)][-capacity:]
    torch.testing.assert_close(state.features[places], torch.stack([z for z, _ in hand.bank]), rtol=0, atol=1e-8)
    torch.testing.assert_close(state.probs[places], torch.stack([q for _, q in hand.bank]), rtol=0, atol=1e-8)
    places = [i % capacity for i in range(seen, seen + capacity)]
    torch.testing.assert_close(state.keys[places], torch.stack([k for k, _ in hand.queue]), rtol=0, atol=1e-8)
    assert state.labels[places].tolist() == [label for _, label in hand.queue]


def filled(**hyper: object) -> trueup.Adapter:
    """One whose bank is three entries on the axes: the first for class 0 by 0.9, the others for class 2 by 0.6."""
    adapter = trueup.adapt(two_layers(), "adacontrast", capacity=3, warmup=1, example=pictures(2), **hyper)
    with torch.no_grad():
        adapter.state.features.copy_(torch.eye(3, 5))
        adapter.state.probs.copy_(torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.0, 0.6], [0.4, 0.0, 0.6]]))
        adapter.state.seen.fill_(3)
    return adapter


def looked(adapter: trueup.Adapter, features: list[float]) -> int:
    """The label of an image whose weak view has these features."""
    with torch.no_grad():
        adapter.net.model[0][1].weight.zero_()
        adapter.net.model[0][1].bias.copy_(torch.atanh(torch.tensor(features)))
    out = adapter.method.forward(adapter.net, pictures(1), adapter.state)
    return int(out.memo["label"])


def test_neighbours_vote_by_their_probabilities_not_by_heads() -> None:
    """Two of three neighbours are for class 2, but 0.9 + 0.4 + 0.4 of probability is for class 0."""
    assert looked(filled(neighbors=3), [0.1, 0.5, 0.5, 0.0, 0.0]) == 0
    assert looked(filled(neighbors=2), [0.1, 0.5, 0.5, 0.0, 0.0]) == 2
    assert looked(filled(neighbors=1), [0.5, 0.1, 0.1, 0.0, 0.0]) == 0


def test_neighbours_are_near_by_the_cosine() -> None:
    """The long entry has the larger product, the short one the smaller angle."""
    adapter = filled(neighbors=1)
    with torch.no_grad():
        adapter.state.features[0] *= 100
        adapter.state.features[1] *= 0.01
    assert looked(adapter, [0.3, 0.4, 0.0, 0.0, 0.0]) == 2


def test_places_that_are_still_empty_do_not_vote() -> None:
    adapter = filled(neighbors=10)
    with torch.no_grad():
        adapter.state.seen.fill_(1)
        adapter.state.probs[1:] = 100.0
    assert looked(adapter, [-0.5, 0.0, 0.0, 0.0, 0.0]) == 0


def test_the_first_images_are_labelled_by_themselves() -> None:
    """By whole batches: neighbours vote once 20 images have been seen."""
    adapter, x = trueup.adapt(convnet(), "adacontrast", warmup=20, lr=0.0), images(8, seed=0)[0]
    voted = []
    for _ in range(5):
        adapter(x)
        with torch.no_grad():
            adapter.state.probs.copy_(torch.tensor([0.0, 0, 0, 1, 0, 0]).expand_as(adapter.state.probs))
        at = int(adapter.state.seen)
        voted.append(adapter.state.labels[at - 8 : at].tolist() == [3] * 8)
    assert voted == [False, False, False, True, True]


def test_keys_of_the_same_class_are_no_negatives() -> None:
    """With all keys of its class the contrast is zero: what remains is the cross-entropy and Σ p̄ log p̄."""
    adapter, x = trueup.adapt(two_layers(), "adacontrast", capacity=50, example=pictures(2)), pictures(1)
    torch.manual_seed(0)  # the views are drawn here, not by the adapter
    out = adapter.method.forward(adapter.net, x, adapter.state)
    label = int(out.memo["label"])
    losses = []
    for all_of in (label, (label + 1) % 3):
        adapter.state.labels.fill_(all_of)
        losses.append(float(adapter.method.loss(adapter.net, out, adapter.state).detach()))
    s = out.logits.detach().softmax(dim=1)[0].tolist()
    alone = -math.log(s[label]) + sum(p * math.log(p + 1e-8) for p in s)
    assert losses[0] == pytest.approx(alone, abs=1e-8)
    assert losses[1] > losses[0] + 0.1


def test_the_queue_starts_with_random_unit_keys_and_labels() -> None:
    x = images(2, seed=0)[0]
    first, second = (trueup.adapt(convnet(), "adacontrast", example=x, seed=seed).state for seed in (0, 1))
    assert first.keys.shape == (16384, 24)
    torch.testing.assert_close(first.keys.norm(dim=1), torch.ones(16384))
    assert float(first.keys.mean(dim=0).abs().max()) < 0.01
    share = first.labels.bincount(minlength=6) / 16384
    assert len(share) == 6
    assert float((share - 1 / 6).abs().max()) < 0.02
    assert not torch.equal(first.keys, second.keys)
    assert not torch.equal(first.labels, second.labels)
    assert int(first.seen) == 0


def test_five_passes_and_the_gradient_is_of_one() -> None:
    adapter = trueup.adapt(convnet(), "adacontrast", example=images(2, seed=0)[0])
    seen: list[tuple[str, int, bool]] = []
    for name, net in (("student", adapter.net), ("slow", adapter.state.slow)):
        net.model.register_forward_hook(
            lambda _, args, out, name=name: seen.append((name, len(args[0]), out.requires_grad))
        )
    adapter(images(10, seed=0)[0])
    assert sorted(seen) == [("slow", 10, False)] * 2 + [("student", 10, False)] * 2 + [("student", 10, True)]


def test_the_answer_is_of_the_images_after_the_step() -> None:
    x = images(24, seed=0, shift=1.0)[0]
    adapter = trueup.adapt(convnet(), "adacontrast", lr=0.05)
    answer = adapter(x)
    with torch.no_grad():
        torch.testing.assert_close(answer, adapter.net(x).logits)
    assert float((answer - trueup.adapt(convnet(), "bn")(x)).abs().max()) > 0.1


def test_views_of_another_kind_have_statistics_of_their_own() -> None:
    """Weak views, strong ones and the images: each pass of the first layer is normalised by its own moments."""
    adapter, x = trueup.adapt(convnet().double(), "adacontrast"), images(12, seed=0, shift=1.0)[0].double()
    adapter(x)
    passes: list[Tensor] = []
    for net in (adapter.net, adapter.state.slow):
        bn = net.model.get_submodule("bn0")
        bn.register_forward_hook(lambda m, _, out: passes.append((out - m.bias.view(1, -1, 1, 1)).detach()))
    adapter(x)
    assert len(passes) == 5
    for out in passes:
        assert float(out.mean(dim=(0, 2, 3)).abs().max()) < 1e-8


def test_running_statistics_move_with_the_weak_views_each_with_its_own() -> None:
    """A tenth of the way; by hand for the first layer, in which both see the same until the student has moved."""
    model, x = convnet().double(), images(8, seed=0, shift=1.0)[0].double()
    adapter = trueup.adapt(model, "adacontrast", norm="ema", lr=0.0)
    adapter(x)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        seen = model.get_submodule("conv0")(weak_view(x))
    old = model.get_submodule("bn0")
    mean, variance = seen.mean(dim=(0, 2, 3)), seen.var(dim=(0, 2, 3), correction=0)
    for net in (adapter.net, adapter.state.slow):
        bn = net.model.get_submodule("bn0")
        torch.testing.assert_close(bn.running_mean, (0.9 * old.running_mean + 0.1 * mean).detach())
        torch.testing.assert_close(bn.running_var, (0.9 * old.running_var + 0.1 * variance).detach())


def test_further_steps_remember_nothing_more() -> None:
    x = images(8, seed=0, shift=1.0)[0]
    once, thrice = (trueup.adapt(convnet(), "adacontrast", norm="ema", steps=n) for n in (1, 3))
    once(x)
    thrice(x)
    assert (once.updates, thrice.updates) == (1, 3)
    for name in ("seen", "features", "probs", "keys", "labels"):
        assert torch.equal(getattr(once.state, name), getattr(thrice.state, name))
    mine, theirs = (a.state.slow.model.get_submodule("bn0").running_mean for a in (once, thrice))
    assert torch.equal(mine, theirs)


def test_without_the_head_among_the_parameters_no_step_is_longer() -> None:
    """By lr (g + 0.9 g) for the body in either case; the head's is ten times that, or none."""
    x = pictures(6)
    moved = {}
    for params in ("all", "backbone", "head"):
        adapter = trueup.adapt(two_layers(), "adacontrast", params=params, lr=0.01, example=x)
        adapter(x)
        pairs = zip(adapter.net.model.parameters(), two_layers().parameters(), strict=True)
        moved[params] = [(p - q).detach() for p, q in pairs]
    for i in range(4):
        alone, without = ("backbone", "head") if i < 2 else ("head", "backbone")
        torch.testing.assert_close(moved["all"][i], moved[alone][i], rtol=0, atol=1e-12)
        assert not moved[without][i].any()
        assert moved["all"][i].any()


def test_nesterov_momentum_and_decay() -> None:
    adapter = trueup.adapt(patchnet(), "adacontrast", example=images(2, seed=0)[0])
    assert type(adapter.optimizer) is torch.optim.SGD
    (group,) = adapter.optimizer.param_groups
    kept = {name: group[name] for name in ("lr", "momentum", "nesterov", "weight_decay")}
    assert kept == {"lr": 2e-4, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    assert len(group["params"]) == len(list(patchnet().parameters()))


def test_student_slow_encoder_and_copies_are_apart() -> None:
    adapter = trueup.adapt(convnet(), "adacontrast", lr=0.1)
    adapter(images(8, seed=0)[0])
    parts = (adapter.net, adapter.state)
    where = [t.untyped_storage().data_ptr() for part in parts for t in (*part.parameters(), *part.buffers())]
    assert len(where) == len(set(where))
    assert not any(p.requires_grad for p in adapter.state.parameters())
    twin = copy.deepcopy(adapter)
    before = [p.clone() for p in twin.state.parameters()]
    adapter(images(8, seed=1)[0])
    assert all(torch.equal(a, b) for a, b in zip(before, twin.state.parameters(), strict=True))
    for name, p in twin.state.slow.selected.items():
        assert p is twin.state.slow.model.get_parameter(name)
    adapter.reset()
    assert int(adapter.state.seen) == 0
    assert not adapter.state.features.any()
    for p, q in zip(adapter.state.slow.model.parameters(), convnet().parameters(), strict=True):
        assert torch.equal(p, q)


def test_users_images_are_not_kept() -> None:
    """Nothing of the state has as many values as an image has per entry, and info says so."""
    adapter = trueup.adapt(convnet(), "adacontrast", capacity=16)
    adapter(images(8, seed=0)[0])
    own = {n: t for n, t in adapter.state.named_parameters() if not n.startswith("slow.")}
    assert {n: tuple(t.shape) for n, t in own.items()} == {
        "features": (16, 24), "probs": (16, 6), "keys": (16, 24), "labels": (16,), "seen": (1,),
    }  # fmt: skip
    assert not adapter.method.info.images


def test_views_stay_in_range_where_it_is_known() -> None:
    x = pictures(8).clamp(-2, 2)
    for known, factor, most in (({"mean": 0.5, "std": 0.25}, 1, 2.0), ({}, 10, 40.0)):
        seen: list[Tensor] = []
        adapter = trueup.adapt(two_layers(), "adacontrast", example=x, **known)
        adapter.state.slow.model.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        adapter(factor * x)
        assert 0.4 * most < max(float(v.abs().max()) for v in seen) <= most + 1e-9


def test_in_other_precisions() -> None:
    """The memory stays as exact as it was, whatever the model becomes."""
    adapter = trueup.adapt(convnet(), "adacontrast", warmup=4, example=images(2, seed=0)[0])
    adapter(images(5, seed=0)[0])
    adapter.double()
    assert adapter(images(12, seed=1)[0].double()).isfinite().all()
    assert adapter.state.keys.dtype == adapter.state.probs.dtype == torch.float64
    assert adapter.state.labels.dtype == torch.int64
    assert adapter.updates == 2
    double = trueup.adapt(two_layers(), "adacontrast", warmup=2, capacity=9, example=pictures(2))
    double(pictures(3))
    double.float()
    assert double(pictures(3).float()).isfinite().all()
    assert double.state.keys.dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = trueup.adapt(convnet(), "adacontrast", warmup=4)
        for seed in (0, 1):
            assert plain(images(8, seed=seed)[0].to(torch.bfloat16)).isfinite().all()
    assert plain.updates == 2


def test_a_memory_of_another_size_is_refused_and_changes_nothing() -> None:
    adapter = trueup.adapt(convnet(), "adacontrast", capacity=16)
    adapter(images(8, seed=0)[0])
    tensors, header = to_file(adapter)
    before = copy.deepcopy(adapter)
    for name in ("state/keys", "state/labels", "state/probs", "state/features"):
        with pytest.raises(ValueError, match=name.partition("/")[2]):
            from_file(adapter, {**tensors, name: tensors[name][:5].clone()}, header, "a file")
    assert difference(before, adapter) == []


def test_what_it_is_not_for_is_refused_and_changes_nothing() -> None:
    adapter = trueup.adapt(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), "adacontrast", norm="ema")
    with pytest.raises(ValueError, match="images"):
        adapter(torch.randn(3, 4))
    assert not adapter.net.model[0].running_mean.any()
    with pytest.raises(ValueError, match="multilabel=True"):
        trueup.adapt(convnet(), "adacontrast", multilabel=True)(images(4, seed=0)[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("neighbors", 0),
        ("warmup", -1),
        ("capacity", 0),
        ("temperature", 0),
        ("momentum", 2),
        ("crop", 0),
        ("crop", 1.1),
    ],
)
def test_meaningless_values_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        trueup.adapt(two_layers(), "adacontrast", **{name: value})
