import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup.memory.image_buffer import PbrsBuffer
from trueup.testing import convnet, images


def flat_model(classes: int = 3, seed: int = 0) -> nn.Sequential:
    """Images (N, 3, 2, 2) to logits, linear, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, classes)).double()


def pictures(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, 2, 2, generator=torch.Generator().manual_seed(seed)).double()


def memory(capacity: int, classes: int, labels: list[int]) -> PbrsBuffer:
    """After images whose only pixel is their number."""
    held = PbrsBuffer(capacity, classes, torch.empty(0, dtype=torch.float64))
    numbers = torch.arange(float(len(labels))).double().view(-1, 1, 1, 1)
    for start in range(0, len(labels), 7):
        held.add(numbers[start : start + 7], torch.tensor(labels[start : start + 7]))
    return held


def test_loss_and_step_by_hand() -> None:
    """Adam's first step goes by lr along the sign of the gradient; /N and /C, with 1e-6 in the logarithm."""
    model, x = flat_model(), pictures(4)
    adapter = trueup.adapt(model, "note", capacity=4, every=4, params="all", lr=0.01)
    answer = adapter(x)
    assert torch.equal(answer, model(x))
    twin = copy.deepcopy(model)
    s = F.softmax(twin(x), dim=1)
    loss = sum(-p * torch.log(p + 1e-6) for row in s for p in row) / 12
    loss.backward()
    for p, q in zip(adapter.net.model.parameters(), twin.parameters(), strict=True):
        expected = q.detach() - 0.01 * q.grad / (q.grad.abs() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-8)


def test_loss_by_hand() -> None:
    adapter = trueup.adapt(flat_model(2), "note", every=2, capacity=2, params="all", example=pictures(1))
    out = adapter.method.forward(adapter.net, pictures(2), adapter.state)
    with torch.no_grad():
        adapter.method.observe(adapter.net, out, adapter.state)
    out.memo["logits"] = torch.tensor([[3.0, 1.0], [1.0, 10.0]], dtype=torch.float64).log()
    by_hand = -sum(p * torch.log(torch.tensor(p + 1e-6)).item() for p in (3 / 4, 1 / 4, 1 / 11, 10 / 11)) / 4
    assert float(adapter.method.loss(adapter.net, out, adapter.state)) == pytest.approx(by_hand, abs=1e-6)


def test_nothing_is_learnt_between_updates() -> None:
    adapter = trueup.adapt(convnet(), "note", every=10)
    for n, updates in ((9, 0), (1, 1), (9, 1), (12, 3)):
        adapter(images(n, seed=n, shift=1.0)[0])
        assert adapter.updates == updates


def test_an_image_after_the_update_is_answered_with_it() -> None:
    """A batch of 24 with updates every 8 is answered as three batches of 8."""
    x = images(24, seed=0, shift=1.0)[0]
    whole, parts = (trueup.adapt(convnet(), "note", every=8, lr=0.1) for _ in range(2))
    assert torch.equal(whole(x), torch.cat([parts(x[:8]), parts(x[8:16]), parts(x[16:])]))


def test_an_answer_does_not_depend_on_the_batch() -> None:
    x = images(16, seed=0, shift=1.0)[0]
    together = trueup.adapt(convnet(), "note")(x)
    alone = torch.cat([trueup.adapt(convnet(), "note")(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_only_the_memory_moves_the_statistics() -> None:
    """By hand for the first layer: a hundredth of the way to the memory's mean and unbiased variance."""
    model = convnet()
    adapter = trueup.adapt(model, "note", every=8, capacity=8, lr=0.0)
    x = images(8, seed=0, shift=1.0)[0]
    adapter(x[:7])
    bn, old = adapter.net.model.get_submodule("bn0"), model.get_submodule("bn0")
    assert torch.equal(bn.running_mean, old.running_mean)
    adapter(x[7:])
    seen = model.get_submodule("conv0")(x).detach()
    mean = 0.99 * old.running_mean + 0.01 * seen.mean(dim=(0, 2, 3))
    variance = 0.99 * old.running_var + 0.01 * seen.var(dim=(0, 2, 3), correction=1)
    torch.testing.assert_close(bn.running_mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bn.running_var, variance, rtol=1e-5, atol=1e-6)


def test_memory_is_full_before_anything_leaves() -> None:
    held = memory(5, 3, [0, 0, 0, 1, 0])
    assert sorted(held.pixels.flatten().tolist()) == [0, 1, 2, 3, 4]
    assert held.labels.tolist() == [0, 0, 0, 1, 0]
    assert len(memory(5, 3, [0, 2]).read()) == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_smaller_class_takes_the_place_of_a_largest(seed: int) -> None:
    """Nine of class 0 and three of class 1, then many of 1 and 2: all three come to four each."""
    torch.manual_seed(seed)
    held = memory(12, 3, [0] * 9 + [1] * 3)
    assert held.labels.tolist().count(0) == 9
    held = memory(12, 3, [0] * 9 + [1] * 3 + [2, 1, 2, 2, 2])
    assert [held.labels.tolist().count(k) for k in range(3)] == [4, 4, 4]
    numbers = held.pixels.flatten().long().tolist()
    assert {12, 14, 15, 16} <= set(numbers)  # none of class 2 was ever of a largest class that had to give way
    assert len(set(numbers)) == 12


def test_within_a_class_each_image_is_kept_with_the_same_chance() -> None:
    """A reservoir: of 40 images of one class 10 stay, each a quarter of the times."""
    torch.manual_seed(0)
    kept = torch.zeros(40)
    for _ in range(600):
        kept[memory(10, 2, [1] * 40).pixels.flatten().long()] += 1
    share = kept / 600
    assert float(share.sum()) == pytest.approx(10)
    assert 0.17 < float(share.min()) <= float(share.max()) < 0.33


def test_classes_stay_balanced_over_a_stream_that_is_not() -> None:
    torch.manual_seed(0)
    held = memory(64, 4, [0] * 300 + [1] * 50 + [2] * 16 + [3] * 16)
    assert [held.labels.tolist().count(k) for k in range(4)] == [16, 16, 16, 16]
    labels = [0] * 300 + [1] * 50 + [2] * 16 + [3] * 16
    assert [labels[i] for i in held.pixels.flatten().long().tolist()] == held.labels.tolist()


def test_images_of_another_size_are_refused_and_change_nothing() -> None:
    adapter = trueup.adapt(convnet(), "note", every=8)
    adapter(images(5, seed=0)[0])
    before = {n: t.clone() for n, t in adapter.state.named_buffers()}
    with pytest.raises(ValueError, match=r"shape \(3, 16, 16\), these have \(3, 20, 20\)"):
        adapter(torch.zeros(4, 3, 20, 20))
    assert all(torch.equal(t, before[n]) for n, t in adapter.state.named_buffers())
    adapter.reset()
    adapter(torch.zeros(4, 3, 20, 20))


def test_memory_is_the_adapters_and_reset_empties_it() -> None:
    adapter = trueup.adapt(convnet(), "note", capacity=8)
    x = images(12, seed=0)[0]
    adapter(x)
    kept = adapter.state.read().clone()
    x.zero_()
    assert torch.equal(adapter.state.read(), kept)
    assert len(kept) == 8
    adapter.reset()
    assert not len(adapter.state.shape)
    assert adapter.state.labels.tolist() == [-1] * 8


def test_further_steps_learn_from_the_memory_again() -> None:
    adapter, once = (trueup.adapt(convnet(), "note", every=8, steps=steps) for steps in (3, 1))
    x = images(8, seed=0, shift=1.0)[0]
    assert torch.equal(adapter(x), once(x))
    assert (adapter.updates, once.updates) == (3, 1)
    for name, buffer in once.net.model.named_buffers():  # a second look moves no statistics
        assert torch.equal(adapter.net.model.get_buffer(name), buffer)


def test_further_steps_normalise_as_the_first() -> None:
    """With lr=0 the memory looks the same each time: the batch's moments are the middle, and nothing moves again."""
    seen: list[Tensor] = []
    adapter = trueup.adapt(convnet(), "note", every=8, capacity=8, steps=3, lr=0.0, example=images(2, seed=0)[0])
    adapter.net.model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    adapter(images(8, seed=0, shift=1.0)[0])
    assert len(seen) == 6  # each step sees the batch and then the memory, which holds the same images
    assert torch.equal(seen[1], seen[3])
    assert torch.equal(seen[1], seen[5])
    assert not torch.allclose(seen[0], seen[1], atol=1e-3)


def test_other_statistics_move_as_they_do_everywhere() -> None:
    x = images(8, seed=0, shift=1.0)[0]
    ours, theirs = (trueup.adapt(convnet(), name, norm="ema") for name in ("note", "bn"))
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("bad", [{"capacity": 1}, {"every": 0}], ids=str)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        trueup.adapt(flat_model(), "note", **bad)


def test_it_says_that_it_keeps_images() -> None:
    assert trueup.get_method("note").info.images
