import logging

import pytest
import torch
import torch.nn.functional as F
from byhand import PROBS, X, identity_head

import trueup
from trueup.testing import convnet, images

SOURCE = [images(32, seed=s) for s in (1, 2, 3)]


def test_fisher_by_hand() -> None:
    """One batch of one sample and the identity as head: dCE/dW_kj = (s_k - 1[k = label]) x_j, squared."""
    adapter = trueup.adapt(identity_head(), "eata", params="all")
    adapter.prepare([X[:1], X[1:2]])
    total = torch.zeros(2, 2, dtype=torch.float64)
    for x, p in zip(X[:2], PROBS[:2], strict=True):
        slope = torch.tensor(p, dtype=torch.float64)
        slope[int(slope.argmax())] -= 1
        total += torch.outer(slope, x).square() / 2
    (fisher,) = adapter.state.fisher.buffers()
    torch.testing.assert_close(fisher, total)


def test_fisher_is_the_square_of_the_mean_gradient() -> None:
    """Not the mean of squares; with batch statistics, as adaptation has them."""
    model = convnet()
    adapter = trueup.adapt(model, "eata")
    adapter.prepare(SOURCE)
    twin = convnet().train()
    twin.bn0.momentum = twin.bn1.momentum = 0.0
    expected = torch.zeros_like(twin.bn0.weight)
    for x, _ in SOURCE:
        logits = twin(x)
        (grad,) = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(dim=1)), twin.bn0.weight)
        expected += grad.square() / 3
    torch.testing.assert_close(adapter.state.fisher.get_buffer("0"), expected, rtol=1e-4, atol=1e-7)


def test_penalty_by_hand() -> None:
    eta, eata = (trueup.adapt(identity_head(), name, example=X, params="all", margin=0.9) for name in ("eta", "eata"))
    eata.state.fisher.get_buffer("0").fill_(0.5)
    for adapter in (eta, eata):
        adapter.net.model.weight.data[0, 1] += 0.1
    losses = [a.method.loss(a.net, a.net(X), a.state).detach() for a in (eta, eata)]
    assert float(losses[1] - losses[0]) == pytest.approx(2000 * 0.5 * 0.1**2)


def test_preparation_survives_reset_and_is_saved(tmp_path: object) -> None:
    adapter = trueup.adapt(convnet(), "eata")
    adapter.prepare(SOURCE)
    fisher = adapter.state.fisher.get_buffer("0").clone()
    assert fisher.any()
    adapter(images(16, seed=9)[0])
    adapter.reset()
    assert torch.equal(adapter.state.fisher.get_buffer("0"), fisher)
    adapter.save(tmp_path / "eata.safetensors")
    other = trueup.adapt(convnet(), "eata")
    other.load(tmp_path / "eata.safetensors")
    other.reset()
    assert torch.equal(other.state.fisher.get_buffer("0"), fisher)


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")  # older timm leaves use_reentrant to torch
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_preparation_of_a_model_that_recomputes() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    plain, saving = timm.create_model("resnet18", num_classes=5), timm.create_model("resnet18", num_classes=5)
    saving.load_state_dict(plain.state_dict())
    saving.set_grad_checkpointing(True)
    fishers = []
    for model in (plain, saving):
        adapter = trueup.adapt(model, "eata")
        adapter.prepare([torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))])
        fishers.append(list(adapter.state.fisher.buffers()))
    assert all(torch.allclose(a, b) for a, b in zip(*fishers, strict=True))


def test_preparing_again_starts_again() -> None:
    adapter = trueup.adapt(convnet(), "eata")
    adapter.prepare(SOURCE)
    fisher = adapter.state.fisher.get_buffer("0").clone()
    adapter.prepare(SOURCE)
    assert torch.equal(adapter.state.fisher.get_buffer("0"), fisher)
    trueup.adapt(convnet(), "eata", params="none").prepare(SOURCE)


def test_an_unprepared_state_loaded_into_a_prepared_adapter(tmp_path: object) -> None:
    bare, prepared = trueup.adapt(convnet(), "eata"), trueup.adapt(convnet(), "eata")
    bare(images(16, seed=9)[0])
    bare.save(tmp_path / "bare")
    prepared.prepare(SOURCE)
    prepared(images(16, seed=8)[0])
    prepared.load(tmp_path / "bare")
    prepared.reset()
    assert not prepared.state.fisher.get_buffer("0").any()


def test_unprepared_it_is_eta_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    eta, eata = trueup.adapt(convnet(), "eta"), trueup.adapt(convnet(), "eata")
    with caplog.at_level(logging.WARNING, logger="trueup"):
        for seed in range(3):
            x = images(16, seed=seed, shift=1.0)[0]
            torch.testing.assert_close(eta(x), eata(x))
    assert sum("without its source images" in r.message for r in caplog.records) == 1


def test_preparation_comes_first() -> None:
    adapter = trueup.adapt(convnet(), "eata")
    adapter(images(16, seed=0)[0])
    with pytest.raises(ValueError, match="before its first batch"):
        adapter.prepare(SOURCE)
    with pytest.raises(ValueError, match="empty"):
        trueup.adapt(convnet(), "eata").prepare([])
    with pytest.raises(ValueError, match="tent needs no preparation"):
        trueup.adapt(convnet(), "tent").prepare(SOURCE)


def test_preparation_leaves_statistics_alone() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "eata", norm="ema")
    adapter.prepare(SOURCE)
    assert torch.equal(adapter.net.model.bn0.running_mean, model.bn0.running_mean)
