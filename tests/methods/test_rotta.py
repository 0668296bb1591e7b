import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup.testing import convnet, images
from trueup.views import cotta_view


def flat_model(classes: int = 3, seed: int = 0) -> nn.Sequential:
    """Images (N, 3, 4, 4) to logits, linear, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(48, classes)).double()


def pictures(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed)).double()


def drawn(x: Tensor) -> Tensor:
    """The first strong views that an adapter with seed 0 draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cotta_view(x)


def test_update_by_hand() -> None:
    """Four images of ages 4 to 1 in a memory for 12: weights e^-A/(1 + e^-A), Adam's first step, the teacher's."""
    model, x = flat_model(), pictures(4)
    adapter = trueup.adapt(model, "rotta", capacity=12, every=4, params="all", lr=0.01)
    assert torch.equal(adapter(x), model(x))
    twin, s = copy.deepcopy(model), F.softmax(model(x), dim=1).detach()
    logp = F.log_softmax(twin(drawn(x)), dim=1)
    a = torch.tensor([4, 3, 2, 1]).double() / 12
    weight = torch.exp(-a) / (1 + torch.exp(-a))
    loss = sum(weight[i] * -(s[i] * logp[i]).sum() for i in range(4)) / 4
    loss.backward()
    assert adapter.state.memory.age[:4].tolist() == [4, 3, 2, 1]
    teacher = adapter.state.teacher.model
    for p, t, q in zip(adapter.net.model.parameters(), teacher.parameters(), twin.parameters(), strict=True):
        student = q.detach() - 0.01 * q.grad / (q.grad.abs() + 1e-8)
        torch.testing.assert_close(p.detach(), student, rtol=0, atol=1e-8)
        torch.testing.assert_close(t.detach(), 0.999 * q.detach() + 0.001 * student, rtol=0, atol=1e-10)


def test_uncertainty_is_the_teachers_entropy() -> None:
    model, x = flat_model(), pictures(5)
    adapter = trueup.adapt(model, "rotta", capacity=30, params="all")
    adapter(x)
    s = F.softmax(model(x), dim=1).detach()
    torch.testing.assert_close(adapter.state.memory.entropy[:5], -(s * torch.log(s + 1e-6)).sum(dim=1))
    assert adapter.state.memory.labels[:5].tolist() == s.argmax(dim=1).tolist()


def test_the_teacher_answers() -> None:
    """A teacher that never moves says what the source says, however far the student goes."""
    model = convnet()
    adapter = trueup.adapt(model, "rotta", norm="source", momentum=1.0, lr=0.1, every=8)
    x = images(24, seed=0, shift=1.0)[0]
    with torch.no_grad():
        torch.testing.assert_close(adapter(x), model(x))
        assert float((adapter.net(x).logits - model(x)).abs().max()) > 0.1
    quick = trueup.adapt(model, "rotta", norm="source", momentum=0.0, lr=0.1, every=8)
    quick(x)
    with torch.no_grad():
        torch.testing.assert_close(quick(x[:1]), quick.net(x[:1]).logits)


def test_statistics_move_with_the_memory_each_with_its_own() -> None:
    """By hand for the first layer: a twentieth of the way, the teacher's to the images, the student's to the views."""
    model, x = convnet(), images(8, seed=0, shift=1.0)[0]
    adapter = trueup.adapt(model, "rotta", every=8, capacity=60, lr=0.0)
    old = model.get_submodule("bn0")
    adapter(x[:7])
    student, teacher = adapter.net.model.get_submodule("bn0"), adapter.state.teacher.model.get_submodule("bn0")
    for bn in (student, teacher):
        assert torch.equal(bn.running_mean, old.running_mean)
        assert torch.equal(bn.running_var, old.running_var)
    adapter(x[7:])
    conv = model.get_submodule("conv0")
    for bn, seen in ((student, conv(drawn(x))), (teacher, conv(x))):
        mean, variance = seen.mean(dim=(0, 2, 3)), seen.var(dim=(0, 2, 3), correction=0)
        torch.testing.assert_close(bn.running_mean, (0.95 * old.running_mean + 0.05 * mean).detach())
        torch.testing.assert_close(bn.running_var, (0.95 * old.running_var + 0.05 * variance).detach())
    assert not torch.equal(student.running_mean, teacher.running_mean)


def test_an_answer_does_not_depend_on_the_batch() -> None:
    x = images(16, seed=0, shift=1.0)[0]
    together = trueup.adapt(convnet(), "rotta")(x)
    alone = torch.cat([trueup.adapt(convnet(), "rotta")(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_updates_come_every_so_many_images() -> None:
    x = images(24, seed=0, shift=1.0)[0]
    whole, parts = (trueup.adapt(convnet(), "rotta", every=8, lr=0.1, momentum=0.5) for _ in range(2))
    assert torch.equal(whole(x), torch.cat([parts(x[:8]), parts(x[8:16]), parts(x[16:])]))
    assert whole.updates == parts.updates == 3
    whole(x[:7])
    assert whole.updates == 3
    whole(x[7:8])
    assert whole.updates == 4


def test_further_steps_look_at_the_memory_again() -> None:
    x = images(8, seed=0, shift=1.0)[0]
    adapter = trueup.adapt(convnet(), "rotta", every=8, steps=3)
    adapter(x)
    assert adapter.updates == 3
    once = trueup.adapt(convnet(), "rotta", every=8)
    once(x)
    mine, theirs = (a.state.teacher.model.get_submodule("bn0").running_mean for a in (adapter, once))
    assert torch.equal(mine, theirs)  # a second look moves no statistics


def test_teacher_student_and_images_are_apart() -> None:
    adapter = trueup.adapt(convnet(), "rotta", every=8, params="all")
    x = images(8, seed=0, shift=1.0)[0]
    adapter(x)
    where = [t.untyped_storage().data_ptr() for part in (adapter.net, adapter.state.teacher) for t in part.parameters()]
    assert len(where) == len(set(where))
    assert not any(p.requires_grad for p in adapter.state.teacher.parameters())
    kept = adapter.state.memory.read().clone()
    x.zero_()
    assert torch.equal(adapter.state.memory.read(), kept)
    adapter.reset()
    assert adapter.state.memory.labels.tolist() == [-1] * 64
    for p, q in zip(adapter.state.teacher.model.parameters(), convnet().parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("method", ["rotta", "note"])
def test_in_other_precisions(method: str) -> None:
    """The kept images follow the model."""
    adapter = trueup.adapt(convnet(), method, every=8, example=images(2, seed=0)[0])
    adapter(images(5, seed=0)[0])
    adapter.double()
    assert adapter(images(12, seed=1)[0].double()).isfinite().all()
    assert adapter.updates == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = trueup.adapt(convnet(), method, every=8)
        plain(images(8, seed=0)[0].to(torch.bfloat16))
    assert plain.updates == 1


def test_what_cannot_be_kept_is_refused_and_changes_nothing() -> None:
    adapter = trueup.adapt(convnet(), "rotta", every=8)
    adapter(images(5, seed=0)[0])
    before = {n: t.clone() for n, t in adapter.state.named_buffers()}
    with pytest.raises(ValueError, match=r"shape \(3, 16, 16\), these have \(3, 20, 20\)"):
        adapter(torch.zeros(4, 3, 20, 20))
    assert all(torch.equal(t, before[n]) for n, t in adapter.state.named_buffers())
    with pytest.raises(ValueError, match="images"):
        trueup.adapt(nn.Linear(4, 2), "rotta", params="all")(torch.randn(3, 4))


@pytest.mark.parametrize("bad", [{"capacity": 1}, {"every": 0}, {"momentum": 2}], ids=str)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        trueup.adapt(flat_model(), "rotta", **bad)
