import torch

import trueup
from trueup.testing import convnet, images


def test_answers_are_the_models() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "source")
    for seed in range(3):
        x = images(8, seed=seed, shift=1.0)[0]
        assert torch.equal(adapter(x), model(x).detach())
