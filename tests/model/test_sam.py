"""A sharpness-aware step by hand: up the gradient by a radius, the gradient there, back, and one step by that."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueup.core.adapter import Adapter
from trueup.core.method import GradientMethod, Info
from trueup.losses import entropy
from trueup.model.runner import Runner
from trueup.model.split_model import Output, SplitModel
from trueup.model.steps import sharpness_aware
from trueup.testing import convnet, images

X = images(12, seed=0, shift=1.0)[0].double()


@dataclass(frozen=True, kw_only=True)
class Sharp(GradientMethod):
    """Entropy of the half that was most certain at first."""

    info = Info(name="sharp", title="Sharp", paper="none")
    radius = 0.1

    def loss(self, net: SplitModel, out: Output, state: Any) -> Tensor | None:
        each = entropy(out.logits)
        if "first" in out.memo:
            out.memo["kept"] = out.memo["first"]["kept"]
        else:
            out.memo["kept"] = each.detach().argsort()[:6]
        return each[out.memo["kept"]].mean()

    def optimizer(self, named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.5)


def test_a_step_by_hand() -> None:
    model = convnet().double()
    adapter = Adapter(model, Sharp(params="all", norm="source"))
    adapter(X)
    names, tensors = zip(*model.named_parameters(), strict=True)
    theta = [p.detach().clone().requires_grad_(True) for p in tensors]

    def loss_at(values: Any, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        p = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (X,)).softmax(dim=1)
        each = -(p * p.log()).sum(dim=1)
        kept = each.detach().argsort()[:6] if kept is None else kept
        return each[kept].mean(), kept

    first, kept = loss_at(theta)
    grads = torch.autograd.grad(first, theta, allow_unused=True)
    length = torch.sqrt(sum((g.square().sum() for g in grads if g is not None), torch.zeros(())))
    steps = [torch.zeros_like(p) if g is None else 0.1 * g / length for p, g in zip(theta, grads, strict=True)]
    up = [(p + step).detach().requires_grad_(True) for p, step in zip(theta, steps, strict=True)]
    second = torch.autograd.grad(loss_at(up, kept)[0], up, allow_unused=True)
    for name, p, g in zip(names, theta, second, strict=True):
        expected = p.detach() if g is None else p.detach() - 0.5 * g
        assert torch.allclose(adapter.net.model.get_parameter(name), expected, atol=1e-9), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_images_of_low_precision_under_autocast(dtype: torch.dtype) -> None:
    """The second pass is exact, and sees the images in the precision of the weights."""
    adapter = Adapter(convnet(), Sharp(params="all", norm="source"))
    seen: list[torch.dtype] = []
    adapter.net.model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert adapter(X.to(dtype)).isfinite().all()
    assert adapter.updates == 1
    assert seen[-2:] == [dtype, torch.float32]


def gradient_of_the_second_loss(loss: Tensor, p: nn.Parameter, second_loss: Any) -> Tensor | None:
    runner = Runner(nn.Linear(1, 1), None)
    runner.backward(loss, [p])
    return sharpness_aware(loss, [p], 1.0, second_loss, runner.backward)


def test_parameters_come_back_also_when_the_second_pass_fails() -> None:
    p = nn.Parameter(torch.tensor([3.0, 4.0]))

    def fails() -> Tensor:
        assert torch.allclose(p.detach(), torch.tensor([3.6, 4.8]))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        gradient_of_the_second_loss((p.square() / 2).sum(), p, fails)
    assert p.tolist() == [3.0, 4.0]


def test_nothing_to_learn_there_means_no_step() -> None:
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    assert gradient_of_the_second_loss((p.square() / 2).sum(), p, lambda: None) is None
    assert p.tolist() == [3.0, 4.0]


def test_without_a_radius_it_is_the_plain_gradient() -> None:
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    loss = (p.square() / 2).sum()
    Runner(nn.Linear(1, 1), None).backward(loss, [p])
    assert p.grad is not None
    assert p.grad.tolist() == [3.0, 4.0]


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    p = nn.Parameter(torch.tensor([0.0]))
    loss = p.sqrt().sum()
    assert gradient_of_the_second_loss(loss, p, lambda: None) is loss
    assert p.tolist() == [0.0]
