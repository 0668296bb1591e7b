import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup.testing import CHECKS, Case, convnet, images
from trueup.views import cotta_view


def flat_model(classes: int = 3, seed: int = 0) -> nn.Sequential:
    """Images (N, 3, 4, 4) to logits, linear, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(48, classes)).double()


def pictures(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed)).double()


def drawn(x: Tensor, *views: int) -> list[Tensor]:
    """The first views that an adapter with seed 0 draws, in parts of so many for each image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [cotta_view(x.repeat(n, 1, 1, 1)) for n in views]


def parameters(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize(("unsure", "chunk", "parts"), [(True, 256, [5]), (True, 7, [2, 2, 1]), (False, 256, [])])
def test_first_batch_by_hand(unsure: bool, chunk: int, parts: list[int]) -> None:
    """Three images: the mean logits over five views, or the teacher's own; the gradient (p - t) z; the teacher's."""
    model, x = flat_model(), pictures(3)
    confidence = 1.0 if unsure else 0.0
    adapter = trueup.adapt(model, "cotta", views=5, chunk=chunk, confidence=confidence, restore=0.0, lr=0.01)
    answer = adapter(x)
    weight, bias = model[1].weight.detach(), model[1].bias.detach()
    z = x.flatten(1)
    target = z @ weight.T + bias
    if unsure:
        each = [v.flatten(1) @ weight.T + bias for part in drawn(x, *parts) for v in part.split(3)]
        assert len(each) == 5
        target = sum(each) / 5
    torch.testing.assert_close(answer, target, rtol=0, atol=1e-8)
    grad = (F.softmax(z @ weight.T + bias, dim=1) - F.softmax(target, dim=1)) / 3
    teacher = adapter.state.teacher.model
    for p, t, p0, g in zip(
        adapter.net.model.parameters(), teacher.parameters(), (weight, bias), (grad.T @ z, grad.sum(dim=0)), strict=True
    ):
        student = p0 - 0.01 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(p.detach(), student if unsure else p0, rtol=0, atol=1e-8)
        torch.testing.assert_close(t.detach(), 0.999 * p0 + 0.001 * p.detach(), rtol=0, atol=1e-12)


def test_the_source_decides_whether_views_are_looked_at() -> None:
    """By the mean over the batch of its greatest probability, whatever student and teacher have become."""
    model, x = flat_model(), pictures(6)
    sure = float(F.softmax(model(x).detach(), dim=1).amax(dim=1).mean())
    for confidence, looked in ((sure + 1e-9, True), (sure - 1e-9, False)):
        adapter = trueup.adapt(model, "cotta", views=4, confidence=confidence, lr=0.0, restore=0.0, example=x)
        with torch.no_grad():
            for p in (*adapter.net.model.parameters(), *adapter.state.teacher.parameters()):
                p.mul_(3)
        plain = adapter.state.teacher(x).logits
        assert torch.equal(adapter(x), plain) != looked


def test_restored_values_are_the_sources() -> None:
    model, x = convnet(), images(24, seed=0, shift=1.0)[0]
    shares = {}
    for restore in (0.0, 0.3, 1.0):
        adapter = trueup.adapt(model, "cotta", restore=restore, views=2)
        adapter(x)
        pairs = zip(parameters(adapter.net.model), parameters(model), strict=True)
        back = torch.cat([(p == q).flatten() for p, q in pairs])
        shares[restore] = float(back.float().mean())
        moved = zip(parameters(adapter.state.teacher), parameters(model), strict=True)
        assert any(not torch.equal(p, q) for p, q in moved)  # the teacher had followed before
    assert shares[0.0] < 0.02
    assert 0.27 < shares[0.3] < 0.35
    assert shares[1.0] == 1.0


def test_teacher_follows_and_anchor_stays() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "cotta", views=2, momentum=0.9, restore=0.0)
    expected = parameters(model)
    for i in range(3):
        adapter(images(24, seed=i, shift=1.0)[0])
        expected = [0.9 * t + 0.1 * p for t, p in zip(expected, parameters(adapter.net.model), strict=True)]
    for t, e in zip(parameters(adapter.state.teacher), expected, strict=True):
        torch.testing.assert_close(t, e, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(parameters(adapter.state.anchor), parameters(model), strict=True))
    nets = (adapter.net, adapter.state.teacher, adapter.state.anchor)
    where = [t.untyped_storage().data_ptr() for net in nets for t in (*net.parameters(), *net.buffers())]
    assert len(where) == len(set(where))
    assert not any(p.requires_grad for p in adapter.state.parameters())  # they are not the optimiser's
    adapter.reset()
    assert all(torch.equal(a, b) for a, b in zip(parameters(adapter.state.teacher), parameters(model), strict=True))


@pytest.mark.parametrize(("chunk", "sizes"), [(1000, [80]), (40, [40, 40]), (25, [20, 20, 20, 20]), (3, [10] * 8)])
def test_views_are_run_in_few_large_batches(chunk: int, sizes: list[int]) -> None:
    """Eight views of ten images; a forward has whole views of the batch."""
    seen: list[int] = []
    x = images(10, seed=0, shift=1.0)[0]
    adapter = trueup.adapt(convnet(), "cotta", views=8, chunk=chunk, confidence=1.0, example=x)
    adapter.state.teacher.model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    adapter(x)
    assert seen == sizes


def test_no_views_where_the_source_is_sure() -> None:
    seen: list[int] = []
    x = images(10, seed=0)[0]
    adapter = trueup.adapt(convnet(), "cotta", confidence=0.0, example=x)
    adapter.state.teacher.model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    adapter(x)
    assert seen == [10]


def test_batch_statistics_in_all_three_and_none_are_kept() -> None:
    model, x = convnet(), images(16, seed=0, shift=1.0)[0]
    adapter = trueup.adapt(model, "cotta", confidence=0.0, lr=0.0, restore=0.0, example=x)
    with torch.no_grad():
        expected = trueup.adapt(model, "bn")(x)
        for net in (adapter.net, adapter.state.teacher, adapter.state.anchor):
            torch.testing.assert_close(net(x).logits, expected)
        torch.testing.assert_close(adapter(x), expected)
    adapter(x)
    for net in (adapter.net, adapter.state.teacher, adapter.state.anchor):
        for name, buffer in model.named_buffers():
            assert torch.equal(net.model.get_buffer(name), buffer)


@pytest.mark.parametrize("norm", ["ema:0.5", "instance", "robust"])
def test_the_teachers_estimates_move_as_the_sources_would(norm: str) -> None:
    """Nothing is learnt and there are no views, so answers are those of the source under the same statistics."""
    ours = trueup.adapt(convnet(), "cotta", norm=norm, lr=0.0, restore=0.0, confidence=0.0)
    theirs, fixed = (trueup.adapt(convnet(), "source", norm=how) for how in (norm, "source"))
    for i, n in enumerate((24, 5, 24, 24)):
        x = images(n, seed=i, shift=1.0)[0]
        answer = ours(x)
        torch.testing.assert_close(answer, theirs(x))
        away = float((answer - fixed(x)).abs().max())
    assert away > 1e-3


@pytest.mark.parametrize("norm", ["ema:0.5", "instance", "robust"])
@pytest.mark.parametrize("steps", [1, 2])
def test_estimates_move_once_and_never_to_views(norm: str, steps: int) -> None:
    model = convnet()
    hyper = {"views": 2, "lr": 0.0, "restore": 0.0, "confidence": 1.0}
    adapter = trueup.adapt(model, "cotta", norm=norm, steps=steps, **hyper)
    for i in range(2):
        adapter(images(24, seed=i, shift=1.0)[0])
    student, teacher, anchor = (dict(n.model.named_buffers()) for n in (adapter.net, *adapter.state.children()))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(teacher[name], student[name])
        assert torch.equal(anchor[name], buffer)
    assert not torch.equal(teacher["bn0.running_mean"], model.get_buffer("bn0.running_mean"))


@pytest.mark.parametrize("norm", ["ema", "robust"])
def test_the_teacher_only_reads_where_the_student_does(norm: str) -> None:
    x = images(24, seed=0, shift=1.0)[0]
    adapter = trueup.adapt(convnet(), "cotta", norm=norm, confidence=0.0, example=x)
    before = [b.clone() for b in adapter.state.buffers()]
    with adapter.net.frozen_statistics():
        adapter.method.forward(adapter.net, x, adapter.state)
    assert all(torch.equal(a, b) for a, b in zip(before, adapter.state.buffers(), strict=True))
    adapter(x)
    assert not all(torch.equal(a, b) for a, b in zip(before, adapter.state.buffers(), strict=True))


def test_channels_that_do_not_fit_are_refused_and_change_nothing() -> None:
    x = images(8, seed=0)[0]
    adapter = trueup.adapt(convnet(), "cotta", norm="ema", mean=(0.5, 0.5), std=(0.2, 0.2), example=x)
    before = [b.clone() for b in adapter.state.buffers()]
    with pytest.raises(ValueError, match="of 2 channels, the images have 3"):
        adapter(x)
    assert all(torch.equal(a, b) for a, b in zip(before, adapter.state.buffers(), strict=True))


def test_views_stay_in_range_where_it_is_known() -> None:
    seen: list[Tensor] = []
    x = pictures(4).clamp(-2, 2)
    for known, most in (({"mean": 0.5, "std": 0.25}, 2.0), ({}, 30.0)):
        adapter = trueup.adapt(flat_model(), "cotta", views=16, confidence=1.0, example=x, **known)
        adapter.state.teacher.model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        adapter(x if known else 10 * x)
        assert 0.5 * most < float(seen[-1].abs().max()) <= most + 1e-9


@pytest.mark.parametrize("how", ["no views", "not mirrored"])
def test_mirrored_views_alone_are_what_harms_gratings(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the contract that fails by default, because a mirrored grating is of another class, then holds."""
    if how == "not mirrored":
        monkeypatch.setattr(torch.Tensor, "flip", lambda x, dims: x)
    hyper = {"confidence": 0.0} if how == "no views" else {}
    CHECKS["not_worse_than_source"](Case(trueup.get_method("cotta"), hyper))


def test_copies_share_nothing_with_the_adapter() -> None:
    adapter = trueup.adapt(convnet(), "cotta", views=2)
    adapter(images(8, seed=0)[0])
    twin = copy.deepcopy(adapter)
    before = parameters(twin.state.teacher)
    adapter(images(8, seed=1)[0])
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(twin.state.teacher), strict=True))
    assert set(twin.state.teacher.selected) == set(twin.net.selected)
    for name, p in twin.state.teacher.selected.items():
        assert p is twin.state.teacher.model.get_parameter(name)


def test_what_is_no_image_is_refused_and_changes_nothing() -> None:
    adapter = trueup.adapt(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), "cotta", norm="ema")
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="images"):
        adapter(x)
    assert not adapter.net.model[0].running_mean.any()


@pytest.mark.parametrize("name", ["views", "chunk", "confidence", "momentum", "restore"])
def test_meaningless_values_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        trueup.adapt(flat_model(), "cotta", **{name: -1})
