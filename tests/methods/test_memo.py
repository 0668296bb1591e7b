import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup.core.state import AdapterState
from trueup.testing import convnet, images, patchnet
from trueup.views import augmix_view


def flat_model(classes: int = 3, seed: int = 0) -> nn.Sequential:
    """Images (N, 3, 4, 4) to logits, linear, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(48, classes)).double()


def pictures(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed)).double()


def drawn(x: Tensor, views: int) -> Tensor:
    """The views that an adapter with seed 0 draws of its first image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return augmix_view(x.repeat(views, 1, 1, 1))


def test_loss_by_hand() -> None:
    """Two views with softmax (3/4, 1/4) and (1/11, 10/11): the mean is ((3/4 + 1/11)/2, ...)."""
    adapter = trueup.adapt(flat_model(2), "memo", views=2, example=pictures(1))
    out = adapter.method.forward(adapter.net, pictures(1), adapter.state)
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, math.log(10.0)]], dtype=torch.float64)
    mean = (3 / 4 + 1 / 11) / 2
    expected = -mean * math.log(mean) - (1 - mean) * math.log(1 - mean)
    loss = adapter.method.loss(adapter.net, trueup.Output(out.x, out.features, logits, logits), adapter.state)
    assert float(loss) == pytest.approx(expected, abs=1e-12)


def test_answer_is_that_of_the_adapted_weights() -> None:
    """By hand: the gradient of the entropy of the mean softmax, one step of SGD, the clean image."""
    model, x = flat_model(), pictures(1)
    answer = trueup.adapt(model, "memo", lr=0.5, views=8)(x)
    weight, bias = model[1].weight.detach(), model[1].bias.detach()
    z = drawn(x, 8).flatten(1)
    s = F.softmax(z @ weight.T + bias, dim=1)
    mean = s.mean(dim=0)
    # dH/ds_vk = -(log mean_k + 1)/8, through the softmax of each view.
    pull = -(mean.log() + 1) / 8
    grad = s * (pull - (s * pull).sum(dim=1, keepdim=True))
    new_weight, new_bias = weight - 0.5 * grad.T @ z, bias - 0.5 * grad.sum(dim=0)
    torch.testing.assert_close(answer, x.flatten(1) @ new_weight.T + new_bias, rtol=0, atol=1e-8)
    assert float((answer - model(x)).detach().abs().max()) > 1e-3


def test_a_step_makes_the_views_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entropy of the mean falls with the lr, on the views that were looked at."""
    model, x = flat_model(), pictures(1, seed=3)
    views = drawn(x, 16)

    def disagreement(model: nn.Module) -> float:
        with torch.no_grad():
            mean = F.softmax(model(views), dim=1).mean(dim=0)
        return float(-(mean * mean.log()).sum())

    adapter = trueup.adapt(model, "memo", lr=0.1, views=16, example=x)
    kept: list[nn.Module] = []
    monkeypatch.setattr(AdapterState, "apply", lambda *_, **__: kept.append(adapter.unwrap()))
    adapter(x)
    assert disagreement(kept[0]) < disagreement(model) - 1e-3


def test_each_image_is_answered_as_if_alone() -> None:
    model, x = convnet(), images(5, seed=1, shift=1.0)[0]
    together = trueup.adapt(model, "memo", views=4)(x)
    for i in range(5):
        assert torch.equal(together[i : i + 1], trueup.adapt(model, "memo", views=4)(x[i : i + 1]))


def test_weights_go_back_to_the_bit() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "memo", views=4, lr=0.1)
    answer = adapter(images(3, seed=1, shift=1.0)[0])
    assert not torch.allclose(answer, model(images(3, seed=1, shift=1.0)[0]), atol=1e-2)
    for name, value in model.state_dict().items():
        assert torch.equal(adapter.net.model.state_dict()[name], value)
    assert all(torch.equal(a, b) for a, b in zip(adapter.unwrap().parameters(), model.parameters(), strict=True))


def test_one_seventeenth_of_the_batchs_statistics() -> None:
    """16 parts of the source's and one of the views', whatever their number, without a trace in the buffers."""
    model, x = convnet().double(), images(1, seed=1, shift=1.0)[0].double()
    adapter = trueup.adapt(model, "memo", views=6, example=x)
    seen: list[Tensor] = []
    handle = adapter.net.model.get_submodule("bn0").register_forward_hook(lambda _, a, out: seen.extend((a[0], out)))
    adapter(x)
    handle.remove()
    entered, left = seen[0].detach(), seen[1].detach()
    assert len(entered) == 6
    bn = model.get_submodule("bn0")
    mean = (16 * bn.running_mean + entered.mean(dim=(0, 2, 3))) / 17
    variance = (16 * bn.running_var + entered.var(dim=(0, 2, 3), correction=0)) / 17
    by_hand = (entered - mean.view(1, -1, 1, 1)) / (variance.view(1, -1, 1, 1) + 1e-5).sqrt()
    by_hand = by_hand * bn.weight.view(1, -1, 1, 1) + bn.bias.view(1, -1, 1, 1)
    torch.testing.assert_close(left, by_hand.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["ema:0.5", "instance", "robust"])
def test_the_answer_moves_no_statistics(norm: str) -> None:
    model, x = convnet(), images(2, seed=1, shift=1.0)[0]
    adapter = trueup.adapt(model, "memo", norm=norm, views=2, lr=0.0, example=x)
    out = adapter.method.forward(adapter.net, x[:1], adapter.state)
    with torch.no_grad():
        answer = adapter.method.predict(adapter.net, out, adapter.state)
        adapter.net.update_estimates()
    for name, buffer in model.named_buffers():
        assert torch.equal(adapter.net.model.get_buffer(name), buffer)
    if norm != "instance":
        torch.testing.assert_close(answer, model(x[:1]).detach())  # with the source's, as they stood


def test_every_image_has_views_drawn_alike() -> None:
    """So an answer depends on its image alone, wherever that comes in a stream."""
    adapter, x = trueup.adapt(convnet(), "memo", views=4), images(3, seed=1, shift=1.0)[0]
    seen: list[Tensor] = []
    adapter(x[:1])
    adapter.net.model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    adapter(x[[1, 2, 1]])
    assert torch.equal(seen[0], seen[4])
    assert not torch.equal(seen[0], seen[2])


def test_views_stay_in_range_where_it_is_known() -> None:
    seen: list[Tensor] = []
    model = flat_model()
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    trueup.adapt(model, "memo", views=32, mean=0.5, std=0.25)(pictures(1).clamp(-2, 2))
    assert max(float(x.abs().max()) for x in seen) <= 2 + 1e-12
    seen.clear()
    trueup.adapt(model, "memo", views=32)(10 * pictures(1))
    assert float(seen[-1].abs().max()) > 5


def test_all_parameters_by_plain_sgd() -> None:
    adapter = trueup.adapt(patchnet(), "memo", example=images(2, seed=0)[0])
    assert type(adapter.optimizer) is torch.optim.SGD
    assert adapter.optimizer.param_groups[0]["momentum"] == 0
    assert set(adapter.net.selected) == {name for name, _ in patchnet().named_parameters()}


def test_what_is_no_image_is_refused() -> None:
    adapter = trueup.adapt(nn.Linear(4, 2), "memo")
    with pytest.raises(ValueError, match="images"):
        adapter(torch.randn(3, 4))
    with pytest.raises(ValueError, match="views"):
        trueup.adapt(flat_model(), "memo", views=0)
