"""Checks of the answers of a method."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.norm import NUMBERS
from trueup.testing.case import Case, SkipCheck, check, difference, frozen_tensors, play, same


@check
def output(case: Case) -> None:
    """One finite row per image, of the model's dtype, without gradient."""
    for x in case.stream(3):
        answer = case.adapter()(x)
        assert answer.shape == case.shape(len(x))
        assert answer.dtype == x.dtype
        assert answer.isfinite().all()
        assert not answer.requires_grad
        assert answer.grad_fn is None


@check
def lr_zero_is_the_plain_forward(case: Case) -> None:
    """With a learning rate of 0 the answers are the model's own, and no parameter moves."""
    if not case.learns:
        raise SkipCheck("takes no gradient steps")
    model = case.model()
    adapter = case.adapter(model, lr=0.0, norm="source")
    with torch.no_grad():
        for x in case.stream(3):
            torch.testing.assert_close(adapter(x), model(x))
    assert all(torch.equal(p, q) for p, q in zip(adapter.net.model.parameters(), model.parameters(), strict=True))


@check
def normalisation(case: Case) -> None:
    """Each policy equals BatchNorm written by hand; of these only "ema" moves the running estimates."""
    for policy in ("source", "batch", "ema"):
        model = case.model()
        still: dict[str, Any] = {"lr": 0.0} if case.learns else {}
        adapter = case.adapter(model, norm=policy, **still)
        running = {i: [b.clone() for b in list(_bn(model, i).buffers())[:2]] for i in (0, 1)}
        for x in case.stream(3):
            adapter(x)
            expected = _by_hand(model, x, policy, running)
            with torch.no_grad():  # a second pass reads the estimates that the first has moved
                torch.testing.assert_close(adapter.net(x).logits, expected, rtol=1e-4, atol=1e-4)
        for i in (0, 1):
            for mine, theirs in zip(list(_bn(adapter.net.model, i).buffers())[:2], running[i], strict=True):
                if policy == "ema":
                    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
                else:
                    assert torch.equal(mine, theirs), f"{policy} wrote to the running estimates"


def _bn(model: nn.Module, i: int) -> nn.Module:
    return model.get_submodule(f"bn{i}")


def _by_hand(model: nn.Module, x: Tensor, policy: str, running: dict[int, list[Tensor]]) -> Tensor:
    """Run the tiny network with BatchNorm spelt out; update `running` as "ema" does."""
    share = {"source": 0.0, "batch": 1.0, "ema": NUMBERS["ema"]}[policy]  # of the batch in the statistics
    with torch.no_grad():
        for i in (0, 1):
            x = F.conv2d(x, model.get_parameter(f"conv{i}.weight"), stride=2, padding=1)
            batch_mean = x.mean(dim=(0, 2, 3))
            batch = batch_mean, (x - batch_mean[:, None, None]).square().mean(dim=(0, 2, 3))
            used = [(1 - share) * old + share * new for old, new in zip(running[i], batch, strict=True)]
            if policy == "ema":
                running[i] = used
            mean, var, scale, shift = (t[:, None, None] for t in (*used, *_bn(model, i).parameters()))
            x = ((x - mean) / (var + 1e-5).sqrt() * scale + shift).relu()
        weight, bias = model.get_parameter("head.weight"), model.get_parameter("head.bias")
        if weight.ndim == 2:
            return F.linear(x.mean(dim=(2, 3)), weight, bias)
        scores = torch.einsum("ndhw,cd->nchw", x, weight[:, :, 0, 0]) + bias[:, None, None]
        return F.interpolate(scores, scale_factor=4, mode="bilinear")


@check
def layer_norm_network(case: Case) -> None:
    """Check that a network without BatchNorm works; "norm" finds its LayerNorms; dropout is off."""
    norms: dict[str, Any] = {"params": "norm"} if case.learns else {}
    adapter = case.adapter(case.model("groups"), **norms)
    answers = play(adapter, case.stream(3))
    assert all(a.isfinite().all() for a in answers)
    allowed = {f"norm{i}.{n}" for i in (0, 1) for n in ("weight", "bias")} if case.learns else set()
    assert set(adapter.net.selected) == allowed
    x = case.stream(1)[0]
    with torch.no_grad():
        assert torch.equal(adapter.net(x).logits, adapter.net(x).logits)


@check
def gradient_contexts(case: Case) -> None:
    """Check equality under no_grad and inference_mode, also with inputs and adapters made there."""
    xs = case.stream(3)
    expected = play(case.adapter(), xs)
    with torch.no_grad():
        assert same(expected, play(case.adapter(), xs))
    with torch.inference_mode():
        adapter = case.adapter()
        assert same(expected, play(adapter, [x.clone() for x in xs]))
    adapter.reset()
    assert same(expected, play(adapter, [x.clone().requires_grad_() for x in xs]))


@check
def ragged_batches(case: Case) -> None:
    """Batches of any size, down to one image, and nothing that is not finite in the state."""
    adapter = case.adapter()
    for n in (24, 7, 1, 1, 2, 24):
        answer = adapter(case.stream(1, n, seed=n)[0])
        assert answer.shape == case.shape(n)
        assert answer.isfinite().all()
    assert all(t.isfinite().all() for t in frozen_tensors(adapter))


@check
def double_precision(case: Case) -> None:
    """Check that a float64 model gives float64 answers, close to those in float32."""
    x = case.stream(1)[0]
    model = case.model()
    single, double = case.adapter(model)(x), case.adapter(model.double())(x.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-3)


@check
def permutation(case: Case) -> None:
    """Check that the order of images in a batch changes neither their answers nor those of the next batch.

    A method that draws pixels at random draws others then; here it takes them all.
    """
    model = case.model().double()
    x, later = (b.double() for b in case.stream(2))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    every: dict[str, Any] = {"samples": 10_000, "queries": 10_000, "capacity": 4096} if case.has("samples") else {}
    a, b = case.adapter(model, **every), case.adapter(model, **every)
    torch.testing.assert_close(a(x)[order], b(x[order]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a(later), b(later), rtol=1e-4, atol=1e-4)


@check
def not_worse_than_source(case: Case) -> None:
    """On a gentle shift, over 20 batches, accuracy is at most two points below the source's."""
    batches = [case.images(32, seed=70_000 + i, shift=0.85) for i in range(20)]
    model = case.model()
    adapter = case.adapter(model)
    ours, source = (torch.stack([case.right(net(x), y) for x, y in batches]).mean() for net in (adapter, model))
    assert ours >= source - 0.02, f"{ours:.1%} after {source:.1%}"


@check
def unwrapped_answers_alike(case: Case) -> None:
    """On a strong shift the unwrapped model is at most three points below what the adapter answered; it only copies.

    A method whose gain is not in weights and statistics says so in `Info.lost`.
    """
    if case.method.info.lost:
        raise SkipCheck(f"the plain model does not have {case.method.info.lost}")
    size = 96 if case.task == "classification" else 8
    batches = [case.images(size, seed=80_000 + i, shift=1.3) for i in range(6)]
    adapter = case.adapter()
    online = [case.right(adapter(x), y) for x, y in batches][-3:]
    before = copy.deepcopy(adapter)
    plain = adapter.unwrap()
    assert difference(before, adapter) == []
    assert not any(module.training for module in plain.modules())
    with torch.no_grad():
        alone = [case.right(plain(x), y) for x, y in batches[-3:]]
    ours, theirs = (torch.stack(part).mean() for part in (alone, online))
    assert ours >= theirs - 0.03, f"{ours:.1%} unwrapped after {theirs:.1%}"
