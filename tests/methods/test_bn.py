import itertools

import torch
from torch import nn

import trueup


def test_answer_by_hand() -> None:
    """Two samples, one channel: their mean is 2 and their biased variance 1, so they become -1 and 1."""
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2, bias=False)).eval()
    model[0].running_mean.fill_(100.0)
    model[1].weight.data = torch.tensor([[1.0], [-2.0]])
    answer = trueup.adapt(model, "bn")(torch.tensor([[1.0], [3.0]]))
    torch.testing.assert_close(answer, torch.tensor([[-1.0, 2.0], [1.0, -2.0]]), rtol=0, atol=1e-4)


def test_one_value_per_channel_keeps_the_source_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)).eval()
    model[0].running_mean.fill_(3.0)
    x = torch.tensor([[5.0]])
    for method, norm in itertools.product(("bn", "tent"), ("batch", "ema")):
        adapter = trueup.adapt(model, method, norm=norm)
        torch.testing.assert_close(adapter(x), model(x).detach())
        assert adapter.updates == (method == "tent")
        assert torch.equal(adapter.net.model[0].running_mean, model[0].running_mean)
