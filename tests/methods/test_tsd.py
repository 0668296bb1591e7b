"""TSD against its paper, by brute force and by hand."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from oracle import BruteForceTsd
from torch import Tensor, nn

import trueup
from trueup.methods.tsd import Tsd
from trueup.testing import convnet, images

BASE = {"per_class": 5, "neighbors": 3, "alignment": 0.1, "consistency": True, "params": "all", "norm": "batch"}
VARIATIONS = [
    {},
    *({"per_class": m} for m in (1, 100, None)),
    *({"neighbors": k} for k in (1, 10)),
    *({"alignment": lam} for lam in (0.0, 1.0)),
    {"consistency": False},
    {"consistency": False, "alignment": 0.0},
    *({"params": p, "norm": n} for p, n in itertools.product(("norm", "head", "all"), ("batch", "source"))),
    {"params": "head", "norm": "source", "neighbors": 1, "per_class": None},
    {"params": "head", "alignment": 0.0},
    {"per_class": None, "neighbors": 10, "alignment": 1.0, "norm": "source"},
]


def stream(batches: int, size: int) -> list[Tensor]:
    return [images(size, seed=900 + i, shift=1.0)[0] for i in range(batches)]


@pytest.mark.slow
@pytest.mark.parametrize("change", VARIATIONS, ids=str)
def test_equals_brute_force_in_float64(change: dict) -> None:
    hyper = {**BASE, **change, "lr": 1e-3}
    model = convnet().double()
    adapter, oracle = trueup.adapt(model, "tsd", **hyper), BruteForceTsd(model, **hyper)
    for t, x in enumerate(stream(20, 12)):
        worst = float((adapter(x.double()) - oracle(x.double())).abs().max())
        assert worst <= 1e-8, f"batch {t}"
    ours, theirs = adapter.net.model.state_dict(), oracle.model.state_dict()
    for name in dict(oracle.model.named_parameters()):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("change", [v for v in VARIATIONS if v.get("neighbors") != 1], ids=str)
def test_equals_brute_force_in_float32(change: dict) -> None:
    hyper = {**BASE, **change, "lr": 1e-4}
    model = convnet()
    adapter, oracle = trueup.adapt(model, "tsd", **hyper), BruteForceTsd(model, **hyper)
    for t, x in enumerate(stream(20, 12)):
        worst = float((adapter(x) - oracle(x)).abs().max())
        assert worst <= 1e-4, f"batch {t}"


def test_equals_brute_force_with_repeated_images() -> None:
    """Frozen features and images that come again: neighbours tie, and the newest must win."""
    hyper = {**BASE, "params": "head", "norm": "source", "lr": 1e-2, "per_class": None}
    model = convnet().double()
    for k in (1, 3, 4):
        adapter = trueup.adapt(model, "tsd", **{**hyper, "neighbors": k})
        oracle = BruteForceTsd(model, **{**hyper, "neighbors": k})
        for x in [b.double() for b in stream(2, 6)] * 4:
            assert float((adapter(x) - oracle(x)).abs().max()) <= 1e-8


def tiny(c: int = 3, d: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(d, c).double()


def test_loss_by_hand() -> None:
    """Three samples, two classes, no bias: every number below is worked out from the paper's equations."""
    head = nn.Linear(2, 2, bias=False).double()
    head.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    adapter = trueup.adapt(head, "tsd", alignment=0.5, neighbors=2, lr=0.0, params="all")
    x = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0 + 1e-9]], dtype=torch.float64)
    adapter(x)
    # Classes: x0 and w0 are class 0; x1, x2 and w1 class 1. Prototypes: (1.5, 0) and ((0+0+1)/3, (1+1+1)/3) = (1/3, 1).
    a = 1 / math.hypot(1 / 3, 1)
    u = [[1.0, a / 3], [0.0, a], [math.sqrt(0.5), math.sqrt(0.5) * (a / 3 + a)]]
    s = [[math.exp(2), 1.0], [1.0, math.e], [1.0, 1.0]]
    s = [[v / sum(row) for v in row] for row in s]
    distillation = 0.0
    for ui, si in zip(u, s, strict=True):
        norm = math.log(sum(math.exp(v) for v in ui))
        distillation += -sum(sk * (uk - norm) for sk, uk in zip(si, ui, strict=True)) / 3
    # Neighbours, K = 2: of x0 itself and w0 (cosine 1); of x1 itself and w1; of x2 itself and, at cosine √½, whichever
    # of x0, x1, w0, w1 is newest among the nearest: x2 leans to (0, 1) by 1e-9, so x1.
    q_w0 = [math.e / (math.e + 1), 1 / (math.e + 1)]
    q_w1 = q_w0[::-1]

    def squared(p: list[float], q: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(p, q, strict=True))

    pairs = [squared(s[0], q_w0), squared(s[1], q_w1), math.sqrt(0.5) * squared(s[2], s[1])]
    expected = distillation + 0.5 * sum(pairs) / 2 / 3
    out = adapter.method.forward(adapter.net, x, adapter.state)
    assert float(adapter.method.loss(adapter.net, out, adapter.state).detach()) == pytest.approx(expected, abs=1e-8)


def test_initial_bank() -> None:
    head = tiny()
    adapter = trueup.adapt(head, "tsd", example=torch.zeros(1, 4, dtype=torch.float64))
    bank, scores = adapter.state, head.weight @ head.weight.T + head.bias
    order = bank.arrival[: bank.size].argsort()
    assert torch.equal(bank.features[order], head.weight)
    torch.testing.assert_close(bank.probs[order], scores.softmax(dim=1))
    assert torch.equal(bank.labels[order], scores.argmax(dim=1))
    h = -(scores.softmax(dim=1) * scores.softmax(dim=1).log()).sum(dim=1)
    torch.testing.assert_close(bank.entropy[order], h)
    with torch.no_grad():
        adapter.net.model.weight.add_(1.0)
    assert torch.equal(bank.features[order], head.weight)


def test_answer_is_the_forward_before_the_update() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "tsd", norm="source")
    x = stream(1, 16)[0]
    first, second = adapter(x), adapter(x)
    torch.testing.assert_close(first, model(x).detach())
    assert not torch.equal(first, second)


def gradients(alignment: float, **hyper: object) -> tuple[trueup.Adapter, dict[str, Tensor | None]]:
    adapter = trueup.adapt(convnet().double(), "tsd", alignment=alignment, **hyper)
    adapter(stream(1, 16)[0].double())
    x = stream(2, 16)[1].double()
    out = adapter.method.forward(adapter.net, x, adapter.state)
    adapter.method.observe(adapter.net, out, adapter.state)
    loss = adapter.method.loss(adapter.net, out, adapter.state)
    names = list(adapter.net.selected)
    grads = torch.autograd.grad(loss, list(adapter.net.selected.values()), allow_unused=True)
    return adapter, dict(zip(names, grads, strict=True))


def test_head_gets_gradient_from_alignment_alone() -> None:
    _, off = gradients(0.0)
    assert off["head.weight"] is None
    assert off["head.bias"] is None
    _, on = gradients(0.1)
    assert on["head.weight"].abs().sum() > 0


def test_gradient_of_similarities() -> None:
    """dL/du_ik = m_i (y_ik - s_ik) / Σ m."""
    adapter = trueup.adapt(convnet().double(), "tsd", alignment=0.0)
    x = stream(1, 16)[0].double()
    out = adapter(x) is not None and adapter.net(x)
    prototypes = adapter.state.prototypes()
    u = F.normalize(out.features.detach(), dim=1) @ F.normalize(prototypes, dim=1).T
    s, y = out.scores.softmax(dim=1).detach(), u.softmax(dim=1)
    m = (out.scores.argmax(dim=1) == u.argmax(dim=1)).double()
    expected = m.unsqueeze(1) * (y - s) / m.sum()
    # d cos(z, c)/dz projects on what is orthogonal to z: chain the expected gradient by hand.
    z = out.features.detach().requires_grad_()
    loss = adapter.method._paper(z, out.scores.detach(), adapter.state, 0.0)
    (grad,) = torch.autograd.grad(loss, z)
    unit = F.normalize(z.detach(), dim=1)
    by_hand = expected @ F.normalize(prototypes, dim=1)
    by_hand = (by_hand - unit * (by_hand * unit).sum(dim=1, keepdim=True)) / z.detach().norm(dim=1, keepdim=True)
    torch.testing.assert_close(grad, by_hand)


def test_loss_does_not_depend_on_the_length_of_features() -> None:
    adapter = trueup.adapt(convnet().double(), "tsd", alignment=0.0)
    x = stream(1, 16)[0].double()
    adapter(x)
    out = adapter.net(x)
    loss = adapter.method._paper(out.features, out.scores, adapter.state, 0.0)
    longer = adapter.method._paper(7 * out.features, out.scores, adapter.state, 0.0)
    torch.testing.assert_close(loss, longer)
    adapter.state.sums.mul_(3)
    torch.testing.assert_close(loss, adapter.method._paper(out.features, out.scores, adapter.state, 0.0))


def test_alignment_step_brings_neighbours_together() -> None:
    """Descending along the alignment term lowers Σ_j sim · |s - q_j|²; the released sign would raise it."""
    adapter = trueup.adapt(convnet().double(), "tsd", neighbors=5)
    for x in stream(3, 16):
        adapter(x.double())
    x = stream(4, 16)[3].double()
    out = adapter.net(x)
    similarity, q = adapter.state.neighbors(out.features.detach(), 5)

    def distance(scores: Tensor) -> Tensor:
        return (similarity * (scores.softmax(dim=1).unsqueeze(1) - q).square().sum(dim=2)).mean()

    p = out.scores.detach().requires_grad_()
    z = out.features.detach()
    loss = adapter.method._paper(z, p, adapter.state, 1.0) - adapter.method._paper(z, p.detach(), adapter.state, 0.0)
    (grad,) = torch.autograd.grad(loss, p)
    assert distance(p - 0.1 * grad) < distance(p)


def test_own_entry_contributes_nothing() -> None:
    """With K = 1 every sample that stays in the bank is its own neighbour: no gradient reaches the head."""
    _, grads = gradients(1.0, neighbors=1, per_class=None)
    assert float(grads["head.weight"].abs().max()) == 0
    assert float(grads["head.bias"].abs().max()) == 0


def test_targets_are_constants() -> None:
    """Prototypes, similarities and neighbours' predictions carry no gradient: only z and softmax(p) do."""
    adapter = trueup.adapt(convnet().double(), "tsd", neighbors=4)
    for x in stream(2, 16):
        adapter(x.double())
    out = adapter.net(stream(3, 16)[2].double())
    z, p = out.features.detach().requires_grad_(), out.scores.detach().requires_grad_()
    loss = adapter.method._paper(z, p, adapter.state, 1.0)
    dz, dp = torch.autograd.grad(loss, (z, p))
    bank = adapter.state
    near, q = bank.neighbors(z.detach(), 4)
    s = p.detach().softmax(dim=1)
    inner = (near.unsqueeze(2) * 2 * (s.unsqueeze(1) - q)).sum(dim=1) / near.numel()
    torch.testing.assert_close(dp, s * (inner - (inner * s).sum(dim=1, keepdim=True)))
    only = torch.autograd.grad(adapter.method._paper(z, p.detach(), bank, 0.0), z)[0]
    torch.testing.assert_close(dz, only)


def disagreeing() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A model, a batch that passes the consistency filter and one that does not.

    Logits choose class 1 by its bias. Its prototype points along the head's long second row; the second batch is closer
    to the first row, which stands in for class 0, where there is no entry.
    """
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2)).double()
    model[0].weight.data = torch.eye(2, dtype=torch.float64)
    model[1].weight.data = torch.tensor([[1.0, 0.0], [0.0, 50.0]], dtype=torch.float64)
    model[1].bias.data = torch.tensor([0.0, 20.0], dtype=torch.float64)
    passes, fails = torch.tensor([[[0.1, 3.0]], [[1.0, 0.1]]], dtype=torch.float64)
    return model, passes, fails


def test_no_survivor_and_no_alignment_takes_no_step() -> None:
    model, passes, fails = disagreeing()
    adapter = trueup.adapt(model, "tsd", alignment=0.0, lr=1e-3)
    adapter(passes)
    assert adapter.updates == 1
    before = [p.clone() for p in adapter.net.model.parameters()]
    momentum = {id(p): {k: v.clone() for k, v in s.items()} for p, s in adapter.optimizer.state.items()}
    assert int(adapter(fails).argmax()) == 1
    assert adapter.state.counts[0] == 0
    to_row, to_prototype = F.cosine_similarity(fails, torch.stack((model[1].weight[0], adapter.state.prototypes()[1])))
    assert to_row > to_prototype, "the batch was meant to fail the consistency filter"
    assert adapter.updates == 1
    assert all(torch.equal(a, b) for a, b in zip(before, adapter.net.model.parameters(), strict=True))
    for p, state in adapter.optimizer.state.items():
        assert all(torch.equal(momentum[id(p)][k], v) for k, v in state.items())


def test_no_survivor_with_alignment_steps_finitely() -> None:
    model, _, fails = disagreeing()
    adapter = trueup.adapt(model, "tsd", alignment=1.0, lr=0.1, neighbors=2)
    adapter(fails)
    assert adapter.updates == 1
    assert all(p.isfinite().all() for p in adapter.net.model.parameters())


def test_class_that_is_never_predicted_keeps_its_weight_as_prototype() -> None:
    head = nn.Linear(2, 3, bias=True).double()
    head.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 0.1]], dtype=torch.float64)
    head.bias.data = torch.tensor([0.0, 0.0, -9.0], dtype=torch.float64)
    adapter = trueup.adapt(head, "tsd", lr=0.0)
    x = torch.tensor([[1.0, 0.2], [0.1, 1.0]], dtype=torch.float64)
    adapter(x)
    assert int(adapter.state.counts[2]) == 0
    out = adapter.net(x)
    loss = adapter.method.loss(adapter.net, out, adapter.state)
    prototypes = adapter.state.prototypes().clone()
    prototypes[2] = head.weight[2].detach()
    u = F.normalize(x, dim=1) @ F.normalize(prototypes, dim=1).T
    each = -(out.scores.softmax(dim=1) * u.log_softmax(dim=1)).sum(dim=1)
    m = (u.argmax(dim=1) == out.scores.argmax(dim=1)).double()
    near, q = adapter.state.neighbors(x, 3)
    mslc = (near * (out.scores.softmax(dim=1).unsqueeze(1) - q).square().sum(dim=2)).mean()
    torch.testing.assert_close(loss.detach(), ((m * each).sum() / m.sum() + 0.1 * mslc).detach())


def test_more_neighbours_than_entries() -> None:
    adapter = trueup.adapt(convnet(), "tsd", neighbors=1000)
    assert adapter(stream(1, 4)[0]).isfinite().all()
    assert adapter.updates == 1


def test_steps_insert_the_batch_once_and_answer_from_the_first_pass() -> None:
    one, three = (trueup.adapt(convnet(), "tsd", steps=n) for n in (1, 3))
    x, later = stream(2, 16)
    assert torch.equal(one(x), three(x))
    assert one.state.size == three.state.size
    assert (one.updates, three.updates) == (1, 3)
    assert not torch.equal(one(later), three(later))


def test_defaults_of_the_variants() -> None:
    paper, released = Tsd(), Tsd(variant="released")
    assert (paper.alignment, paper.consistency) == (0.1, True)
    assert (released.alignment, released.consistency) == (0.0, False)
    assert paper.lr == 1e-4
    with pytest.raises(ValueError, match="consistency"):
        Tsd(variant="released", consistency=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"per_class": 0},
        {"per_class": -1},
        {"neighbors": 0},
        {"alignment": -0.1},
        {"variant": "official"},
        {"lr": float("nan")},
        {"steps": 0},
        {"norm": "train"},
        {"params": ""},
        {"per_class": 1.5},
    ],
    ids=str,
)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Tsd(**bad)


def test_released_loss_by_hand() -> None:
    """KL(softmax(u) || softmax(softmax(p))) with L1-normalised similarities, for one sample and two classes."""
    head = nn.Linear(2, 2, bias=False).double()
    head.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    adapter = trueup.adapt(head, "tsd", variant="released", lr=0.0)
    x = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    adapter(x)
    unit = (3 / math.sqrt(10), 1 / math.sqrt(10))
    c0 = (1 + unit[0], unit[1])  # w0 and x, each of length one
    u0 = 0.75 * c0[0] / sum(c0) + 0.25 * c0[1] / sum(c0)
    y0 = math.exp(u0) / (math.exp(u0) + math.exp(0.25))
    s0 = math.exp(3) / (math.exp(3) + math.exp(1))
    t0 = math.exp(s0) / (math.exp(s0) + math.exp(1 - s0))
    expected = y0 * math.log(y0 / t0) + (1 - y0) * math.log((1 - y0) / (1 - t0))
    out = adapter.net(x)
    assert float(adapter.method.loss(adapter.net, out, adapter.state).detach()) == pytest.approx(expected, abs=1e-10)
