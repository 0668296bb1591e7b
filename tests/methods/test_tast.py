import copy
import math

import pytest
import torch
from byhand import X, identity_head
from torch import Tensor, nn

import trueup
from trueup.testing import convnet, images


def head(classes: int = 3, wide: int = 8) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Linear(wide, classes).double()


def rows(n: int, seed: int, wide: int = 8) -> Tensor:
    return 2 * torch.randn(n, wide, generator=torch.Generator().manual_seed(seed)).double()


class ByHand:
    """The paper's procedure, support by support and member by member; only the random projections are borrowed."""

    def __init__(self, model: nn.Linear, projectors: nn.Module, per_class: int | None, k: int, steps: int) -> None:
        self.model, self.per_class, self.k, self.steps = model, per_class, k, steps
        self.weight, self.enter, self.leave, self.bias = (
            getattr(projectors, name).detach().clone().requires_grad_() for name in ("weight", "enter", "leave", "bias")
        )
        self.adam = torch.optim.Adam([self.weight, self.enter, self.leave, self.bias], lr=1e-3)
        self.supports: list[tuple[Tensor, int, float]] = []
        self.enters(model.weight)

    def enters(self, z: Tensor) -> None:
        for row in z.detach():
            s = self.model(row).softmax(dim=0).detach()
            self.supports.append((row, int(s.argmax()), float(-(s * s.log()).sum())))
        if self.per_class is not None:
            classes = [sorted((s for s in self.supports if s[1] == c), key=lambda s: s[2]) for c in range(3)]
            self.supports = [s for kept in classes for s in kept[: self.per_class]]

    def project(self, z: Tensor, e: int) -> Tensor:
        return self.weight @ (z * self.enter[e]) * self.leave[e] + self.bias[e]

    def logits(self, z: Tensor, e: int) -> Tensor:
        of_class = [[self.project(s[0], e) for s in self.supports if s[1] == c] for c in range(3)]
        g, zero = self.project(z, e), torch.tensor(0.0).double()
        means = [torch.stack(mine).mean(dim=0) if mine else None for mine in of_class]
        return torch.stack([zero if m is None else 10 * (g @ m) / (g.norm() * m.norm()) for m in means])

    def __call__(self, z: Tensor) -> tuple[Tensor, float]:
        self.enters(z)
        for _ in range(self.steps):
            answer, loss = torch.zeros(len(z), 3).double(), torch.tensor(0.0).double()
            for i, row in enumerate(z):
                far = [-float(row @ s[0] / (row.norm() * s[0].norm())) for s in self.supports]
                near = sorted(range(len(far)), key=far.__getitem__)[: min(self.k, self.per_class or self.k)]
                for e in range(len(self.bias)):
                    theirs = [self.logits(self.supports[j][0], e).detach() for j in near]
                    answer[i] += sum(p.softmax(dim=0) for p in theirs) / len(near) / len(self.bias)
                    target = sum(torch.eye(3).double()[p.argmax()] for p in theirs) / len(near)
                    log_s = self.logits(row, e).log_softmax(dim=0)
                    loss = loss + sum(t * (t.log() - q) for t, q in zip(target, log_s, strict=True) if t > 0)
            loss = loss / (len(z) * 3)
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()
        return answer.log(), float(loss.detach())


@pytest.mark.parametrize(
    "hyper", [{}, {"per_class": 2, "neighbors": 3}, {"per_class": None, "neighbors": 5}, {"steps": 3}], ids=str
)
def test_stream_by_hand(hyper: dict) -> None:
    """Supports, answers and each update of the projections."""
    model = head()
    adapter = trueup.adapt(model, "tast", members=2, example=rows(2, 0), **hyper)
    method = adapter.method
    expected = ByHand(model, adapter.state.projectors, method.per_class, method.neighbors, method.steps)
    for seed in (1, 2, 3):
        answer, _ = expected(rows(5, seed))
        torch.testing.assert_close(adapter(rows(5, seed)), answer, rtol=0, atol=1e-8)
        for name in ("weight", "enter", "leave", "bias"):
            mine, theirs = getattr(adapter.state.projectors, name).detach(), getattr(expected, name).detach()
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)
    bank = adapter.state.bank
    assert sorted(bank.features[: bank.size].tolist()) == sorted(s[0].tolist() for s in expected.supports)


def single(bias: float) -> trueup.Adapter:
    """One member that sees the difference of two features, and a bias."""
    adapter = trueup.adapt(identity_head(), "tast", members=1, neighbors=2, example=X)
    for g in (adapter.state.projectors, adapter.state.before):
        g.weight.data, g.bias.data = torch.tensor([[1.0, -1.0]]).double(), torch.tensor([[bias]]).double()
        g.enter.data, g.leave.data = torch.ones(1, 2).double(), torch.ones(1, 1).double()
    return adapter


def test_loss_and_answer_of_one_image_by_hand() -> None:
    """Projected: w0 1.5, w1 -0.5, x 0.4; centroids 1.5 and -0.05. x, of class 1, says 0, its neighbour w1 says 1."""
    adapter, x = single(bias=0.5), torch.tensor([[1.0, 1.1]]).double()
    out = adapter.net(x)
    adapter.method.observe(adapter.net, out, adapter.state)
    loss = adapter.method.loss(adapter.net, out, adapter.state)
    assert float(loss.detach()) == pytest.approx((-math.log(2) + 10 + math.log1p(math.exp(-20))) / 2, abs=1e-12)
    assert adapter(x).tolist() == [[pytest.approx(math.log(0.5), abs=1e-12)] * 2]


def test_loss_is_a_sum_over_members() -> None:
    adapter = trueup.adapt(head(), "tast", members=3, example=rows(2, 0))
    out = adapter.net(rows(6, 1))
    adapter.method.observe(adapter.net, out, adapter.state)
    whole = float(adapter.method.loss(adapter.net, out, adapter.state).detach())
    each = []
    for e in range(3):
        state = copy.deepcopy(adapter.state)
        for name in ("enter", "leave", "bias"):
            setattr(state.projectors, name, nn.Parameter(getattr(state.projectors, name).data[e : e + 1]))
        each.append(float(adapter.method.loss(adapter.net, out, state).detach()))
    assert whole == pytest.approx(sum(each), abs=1e-12)
    assert min(each) > 0


def test_projections_start_as_kaiming_normal() -> None:
    adapter = trueup.adapt(head(wide=512), "tast", members=20, example=rows(2, 0, 512))
    g = adapter.state.projectors
    assert (g.weight.shape, g.enter.shape, g.leave.shape) == ((128, 512), (20, 512), (20, 128))
    for values, fan_in in ((g.weight, 512), (g.enter, 512), (g.leave, 128)):
        assert float(values.detach().std()) == pytest.approx(math.sqrt(2 / fan_in), rel=0.05)
    assert not g.bias.any()
    assert float(torch.corrcoef(g.enter.detach()).triu(diagonal=1).abs().max()) < 0.3


def test_no_more_neighbours_than_supports_of_a_class() -> None:
    few, capped = (trueup.adapt(head(), "tast", per_class=2, neighbors=k) for k in (2, 8))
    for seed in (1, 2):
        assert torch.equal(few(rows(9, seed)), capped(rows(9, seed)))


def test_a_class_without_supports_is_neither_near_nor_far() -> None:
    """Its weight is classified as another's; its logit is 0, however large a bias the projections have learnt."""
    model = nn.Linear(2, 3).double()
    model.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 0.1]]).double()
    model.bias.data = torch.tensor([0.0, 0.0, -9.0]).double()
    adapter = trueup.adapt(model, "tast", members=2, example=X)
    assert adapter.state.bank.counts.tolist()[2] == 0
    g = adapter.state.projectors
    g.bias.data += 100
    assert not g.logits(X, g.centroids(adapter.state.bank))[:, :, 2].any()
    assert adapter(X).isfinite().all()


def test_without_a_filter_nothing_is_lost() -> None:
    adapter = trueup.adapt(identity_head(), "tast", per_class=None, members=2)
    for _ in range(10):
        adapter(X)
    assert adapter.state.bank.size == 2 + 30


def test_several_steps_answer_from_before_the_last() -> None:
    """The third step changes what is remembered, not the answer; two updates lie before it."""
    x = images(24, seed=0, shift=1.0)[0]
    adapter, twice = (trueup.adapt(convnet(), "tast", steps=n, lr=0.01) for n in (3, 2))
    answer = adapter(x)
    twice(x)
    for old, now in zip(adapter.state.before.parameters(), twice.state.projectors.parameters(), strict=True):
        assert torch.equal(old, now)
    near = twice.method._near(
        twice.net(x), twice.state.bank, twice.state.projectors, twice.state.projectors.centroids(twice.state.bank)
    )
    torch.testing.assert_close(answer.exp(), near.softmax(dim=3).mean(dim=2).mean(dim=0), rtol=1e-5, atol=1e-6)
    assert adapter.updates == 3


def test_only_the_projections_learn() -> None:
    model, x = convnet(), images(24, seed=0, shift=1.0)[0]
    adapter = trueup.adapt(model, "tast")
    for _ in range(3):
        adapter(x)
    assert adapter.updates == 3
    for name, p in adapter.net.model.named_parameters():
        assert torch.equal(p, model.get_parameter(name))
    assert not any(p.requires_grad for p in adapter.state.before.parameters())
    other = trueup.adapt(model, "tast", params="norm")
    other(x)
    changed = {n for n, p in other.net.model.named_parameters() if not torch.equal(p, model.get_parameter(n))}
    assert changed == {f"bn{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}


def test_reset_brings_the_first_projections_back() -> None:
    adapter = trueup.adapt(convnet(), "tast", example=images(2, seed=0)[0])
    start = [p.detach().clone() for p in adapter.state.parameters()]
    adapter(images(24, seed=0, shift=1.0)[0])
    adapter.reset()
    assert all(torch.equal(p, q) for p, q in zip(adapter.state.parameters(), start, strict=True))
    assert adapter.state.bank.size == 6
    other = trueup.adapt(convnet(), "tast", example=images(2, seed=0)[0], seed=1)
    assert not torch.equal(other.state.projectors.weight, adapter.state.projectors.weight)


@pytest.mark.parametrize("method", ["tast", "tast-bn"])
def test_in_other_precisions_and_with_labels(method: str) -> None:
    """TAST leaves the model's weights alone, so that they may have 16 bits."""
    x = images(12, seed=0)[0]
    adapter = trueup.adapt(convnet(), method, example=x)
    adapter(x)
    other = torch.bfloat16 if method == "tast" else torch.float64
    adapter.to(other)
    assert adapter(x.to(other)).isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = trueup.adapt(convnet(), method)
        assert plain(x.to(torch.bfloat16)).isfinite().all()
    assert plain.updates == 1
    labels = trueup.adapt(convnet(), method, multilabel=True)
    assert labels(x).shape == (12, 6)
    assert labels.updates == 1


@pytest.mark.parametrize("bad", [{"per_class": 0}, {"neighbors": 0}, {"members": 0}], ids=str)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        trueup.adapt(identity_head(), "tast", **bad)
