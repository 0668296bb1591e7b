"""Activations that are worked out again in backward: the same bits, and less that is kept."""

from pathlib import Path
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trueup
from trueup.model import recompute
from trueup.model.recompute import blocks_of
from trueup.testing import convnet, images
from trueup.testing.case import difference, play, same

XS = [images(12, seed=i, shift=1.0)[0] for i in range(4)]
SMALL = [torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def resnet(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return torchvision.models.resnet18(weights=None, num_classes=5)


def weights(adapter: trueup.Adapter) -> list[Tensor]:
    return [t.detach().clone() for t in adapter.net.model.state_dict().values()]


def pair(model: nn.Module, method: str = "tent", **hyper: Any) -> list[trueup.Adapter]:
    """As usual and with low memory, in one layout."""
    hyper = {"params": "all", "lr": 1e-3, "channels_last": False} | hyper
    return [trueup.adapt(model, method, memory=memory, **hyper) for memory in ("usual", "low")]


@pytest.mark.parametrize("norm", ["source", "batch", "ema", "mix", "prior", "robust"])
@pytest.mark.parametrize("params", ["norm", "all"])
def test_low_memory_changes_no_bit(params: str, norm: str) -> None:
    """Of what is learnt: only banks are rounded, and Tent has none."""
    plain, low = (
        trueup.adapt(resnet(), "tent", norm=norm, params=params, lr=1e-3, memory=memory, channels_last=False)
        for memory in ("usual", "low")
    )
    assert same(play(plain, SMALL), play(low, SMALL))
    assert same(weights(plain), weights(low))


def kept_bytes(adapter: trueup.Adapter, x: Tensor) -> int:
    """What autograd keeps for backward, each storage once, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in adapter.net.parameters()}
    seen: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    out = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), adapter.net.normalizing(len(x)):
        out.append(adapter.net(x).logits)  # held, so that no storage is used twice
    return sum(seen.values())


def test_low_memory_keeps_the_inputs_of_blocks_alone() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None, num_classes=5)
    usual, low = (trueup.adapt(model, "tent", params="all", example=SMALL[0], memory=m) for m in ("usual", "low"))
    assert kept_bytes(low, SMALL[0]) < 0.4 * kept_bytes(usual, SMALL[0])


def test_blocks_are_parts_that_follow_one_another() -> None:
    model = resnet()
    names = {module: name for name, module in model.named_modules()}
    assert [names[b] for b in blocks_of(model, "fc")] == [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    vit = torchvision.models.VisionTransformer(32, 16, 3, 2, 8, 16, num_classes=4)
    assert blocks_of(vit, "heads.head") == list(vit.encoder.layers)
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert blocks_of(nn.Sequential(inner, nn.Linear(4, 2)), "1") == []  # layers alone: nothing lies between them


def test_the_block_with_the_head_is_left_alone() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(self.norm(x))
            return out

    model = nn.Sequential(Last(), Last())
    assert blocks_of(model, "1.fc") == [model[0]]


@pytest.mark.parametrize("method", ["tsd", "t3a"])
def test_low_memory_stores_features_in_half_precision(method: str, tmp_path: Path) -> None:
    plain, low = (trueup.adapt(convnet(), method, memory=memory) for memory in ("usual", "low"))
    for a, b in zip(play(plain, XS), play(low, XS), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.05)
    for name, t in low.state.named_buffers():
        assert t.dtype == (torch.float16 if name in ("features", "probs") else plain.state.get_buffer(name).dtype)
    assert low.state.features.any()
    low.save(tmp_path / "state")
    later = trueup.adapt(convnet(), method, memory="low")
    later.load(tmp_path / "state")
    assert same(play(low, XS), play(later, XS))


class Chain(nn.Sequential):
    """A Sequential whose own forward does more than to call its parts."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return x[:, :, :-2, :-2] * 0.5 + out


class Twice(nn.Module):
    """A block that is called twice in a forward, once with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList([Block()])
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        x = self.blocks[0](x, scale=2.0)
        out: Tensor = self.fc(x.mean(dim=(2, 3)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.bn(self.conv(x)).relu_() * scale
        return out


class Writer(Block):
    """A block that changes its input in place."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x.add_(1.0).sin_(), scale)


def made(*parts: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


def plain_chain() -> nn.Module:
    parts = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(6)]
    return made(*(layer for part in parts for layer in part))


def vgg() -> nn.Module:
    """VGG without its 100 million weights after the convolutions."""
    model = torchvision.models.vgg11_bn(weights=None)
    model.classifier = nn.Sequential(nn.Linear(512 * 7 * 7, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 5))
    return model


MODELS = {
    "a chain with a forward of its own": lambda: made(nn.Sequential(Chain(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))),
    "a block twice": Twice,
    "blocks that write": lambda: made(Writer(), Block(), Writer()),
    "a plain chain": plain_chain,
    "vgg": vgg,
    "densenet": lambda: timm.create_model("densenet121", num_classes=5, growth_rate=4, block_config=(2, 2)),
    "mobilenet": lambda: torchvision.models.mobilenet_v3_small(weights=None, num_classes=5),
    "unet": lambda: smp.Unet("resnet18", encoder_weights=None, classes=3),
}


@pytest.mark.parametrize("name", MODELS)
def test_whatever_a_model_is_made_of(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    usual, low = pair(model)
    assert same(play(usual, SMALL), play(low, SMALL))
    assert same(weights(usual), weights(low))
    assert usual.updates == low.updates == len(SMALL)
    assert not any("forward" in vars(module) for module in low.net.modules())


@pytest.mark.parametrize(("name", "most"), [("a plain chain", 0.6), ("vgg", 0.75), ("a block twice", 0.8)])
def test_there_is_something_to_save(name: str, most: float) -> None:
    usual, low = pair(MODELS[name](), example=SMALL[0])
    assert kept_bytes(low, SMALL[0]) < most * kept_bytes(usual, SMALL[0])


def test_a_block_that_writes_keeps_its_activations_and_no_other() -> None:
    _, low = pair(model := made(Writer(), Block()), example=SMALL[0])
    before = [type(b).__name__ for b in blocks_of(low.net.model, low.net.head)]
    assert before == ["Writer", "Block"]
    low(SMALL[0])
    assert [type(b).__name__ for b in low.net._fitness.unfit] == ["Writer"]
    assert not any("forward" in vars(module) for module in (*model.modules(), *low.net.modules()))


def test_estimates_move_once_where_a_pass_is_taken_again() -> None:
    usual, low = pair(made(Writer(), Block()), norm="ema")
    assert same(play(usual, SMALL), play(low, SMALL))
    assert same(weights(usual), weights(low))


# Layout


def layout(adapter: trueup.Adapter) -> bool:
    convs = [m.weight for m in adapter.net.modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)]
    return all(w.is_contiguous(memory_format=torch.channels_last) for w in convs if w.shape[1] > 1)


class Viewing(nn.Module):
    """Flattens with a view, which needs the usual layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, stride=4), nn.Linear(4 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.conv(x).view(len(x), -1))
        return out


def test_channels_are_last_where_a_model_can_be_run_so(tmp_path: Path) -> None:
    for model, goes in ((resnet(), True), (Viewing(), False)):
        adapter = trueup.adapt(model, "tent", params="all", memory="low")
        play(adapter, SMALL)
        assert adapter.net.engine.channels_last is goes
        assert layout(adapter) is goes
        adapter.save(tmp_path / "state")
        for example in (None, SMALL[1]):
            later = trueup.adapt(model, "tent", params="all", memory="low", example=example)
            later.load(tmp_path / "state")
            assert difference(adapter, later) == []
            assert later.net.engine == adapter.net.engine
            twin = trueup.adapt(model, "tent", params="all", memory="low")
            twin.load(tmp_path / "state")
            assert same(play(later, SMALL), play(twin, SMALL))


def test_what_is_said_of_the_layout_counts() -> None:
    said = trueup.adapt(resnet(), "tent", memory="low", channels_last=False, example=SMALL[0])
    assert not layout(said)
    assert not layout(trueup.adapt(resnet(), "tent", example=SMALL[0]))


# Blocks of all kinds


class Listed(nn.Module):
    """Writes to the list that it is given, as HRNet's stages do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        xs[0] = self.a(xs[0])
        xs[0] = self.b(xs[0])
        return [xs[0] + 1]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stages, self.fc = nn.Conv2d(3, 4, 3), nn.ModuleList([Listed(), Listed()]), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        xs = [self.stem(x)]
        for stage in self.stages:
            xs = stage(xs)
        out: Tensor = self.fc(xs[0].mean(dim=(2, 3)))
        return out


class Keyword(Block):
    """Has a keyword that torch's own checkpoint has, too."""

    def forward(self, x: Tensor, debug: bool = False) -> Tensor:  # type: ignore[override]
        return super().forward(x, 3.0 if debug else 1.0)


class Keywords(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Keyword()])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.blocks[0](self.stem(x), debug=True).mean(dim=(2, 3)))
        return out


class Own(nn.Module):
    """A model that works out its activations again by itself, several blocks at once."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.blocks, self.fc = nn.Conv2d(3, 4, 3), nn.Sequential(Block(), Block()), nn.Linear(4, 5)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        z = checkpoint(self.blocks, self.stem(x), use_reentrant=self.reentrant)
        out: Tensor = self.fc(z.mean(dim=(2, 3)))
        return out


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, where a probe has no gradient
@pytest.mark.parametrize("norm", ["source", "batch", "ema"])
@pytest.mark.parametrize("kind", ["listed", "keywords", "own", "own-reentrant", "twice"])
def test_blocks_of_all_kinds_learn_the_same(kind: str, norm: str) -> None:
    torch.manual_seed(0)
    kinds = {"listed": Branches, "keywords": Keywords, "twice": Twice}
    model = kinds[kind]() if kind in kinds else Own(kind == "own-reentrant")
    usual, low = pair(model, norm=norm, lr=1e-2)
    assert same(play(usual, SMALL), play(low, SMALL))
    assert same(weights(usual), weights(low))
    assert usual.updates == len(SMALL)


class Counting(Block):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.seen += 1
        return super().forward(x, scale)


def test_buffers_are_written_once() -> None:
    usual, low = pair(made(Counting(), Block(), Counting()))
    assert same(play(usual, SMALL), play(low, SMALL))
    assert same(weights(usual), weights(low))
    assert float(low.net.model[1].seen) == len(SMALL)


class Gate(Block):
    """Is told something by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = torch.zeros(1, 4, 1, 1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(super().forward(x, scale) + self.gamma)


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gen, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 5)
        self.blocks = nn.ModuleList([Gate(), Gate()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        gamma = torch.sigmoid(5 * self.gen(x.mean(dim=(0, 2, 3))))[None, :, None, None]
        for block in self.blocks:
            block.gamma = gamma
            x = block(x)
        out: Tensor = self.fc(x.mean(dim=(2, 3)))
        return out


class Residual(nn.Module):
    """Adds to the input of a block in place, which is right as long as nobody needs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.fc = nn.Linear(48, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList([Narrow() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x[:, :, :4, :4].flatten(1))) * 1.0
        for block in self.blocks:
            x += block(x)
        out: Tensor = self.fc(x)
        return out


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.fc(x)))


def test_blocks_may_be_told_by_attributes() -> None:
    torch.manual_seed(0)
    usual, low = pair(Told(), lr=1e-2)
    assert same(play(usual, SMALL), play(low, SMALL))
    assert same(weights(usual), weights(low))
    assert not low.net._fitness.unfit


def test_an_input_may_be_written_to_afterwards() -> None:
    torch.manual_seed(0)
    usual, low = pair(Residual(), params="norm", lr=1e-2)
    assert same(play(usual, SMALL), play(low, SMALL))
    assert same(weights(usual), weights(low))
    assert usual.updates == len(SMALL)
    assert len(low.net._fitness.unfit) == 3


def test_the_random_state_of_a_device_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch knows the device by what goes into a block."""
    seen: list[int] = []
    run = recompute.checkpoint
    monkeypatch.setattr(
        recompute, "checkpoint", lambda f, *args, **kw: (seen.append(len(args)), run(f, *args, **kw))[1]
    )
    _, low = pair(made(Block(), Block()))
    low(SMALL[0])
    assert seen
    assert set(seen) == {1}
