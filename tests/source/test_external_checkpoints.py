"""Checkpoints in the layouts of DomainBed and of TSD's authors load exactly or not at all, and run nothing."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trueup.model.heads import HeadNotFoundError
from trueup.source.external_checkpoints import load_external, read_external
from trueup.source.networks import build_network

EXAMPLE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Named(nn.Module):
    """A module under a name: what DomainBed's and the authors' classes come to in a state dict."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(x)


class Algorithm(nn.Module):
    """Featurizer and classifier, and both once more in a Sequential, as both repositories' ERM keeps them."""

    def __init__(self, featurizer: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.featurizer, self.classifier = featurizer, classifier
        self.network = nn.Sequential(featurizer, classifier)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


def trained(model: nn.Module) -> nn.Module:
    """Other statistics than fresh ones, so that a buffer left behind shows."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape) + 0.5)
        elif name.endswith("num_batches_tracked"):
            buffer.fill_(7)
    return model.eval()


# A name, its head and the width of its features: the two repositories' own network, and a small one for the rest.
RESNET = ("resnet18", "fc", 512)
SMALL = ("digits-net", "head", 128)


def fresh(name: str = SMALL[0]) -> nn.Module:
    torch.manual_seed(1)
    return build_network(name, 4)


def features(name: str, head: str) -> nn.Module:
    torch.manual_seed(2)
    model = build_network(name, 1000)
    setattr(model, head, nn.Identity())
    return model


def domainbed(net: tuple[str, str, int] = SMALL, classifier: nn.Module | None = None) -> tuple[Algorithm, dict]:
    name, head, width = net
    algorithm = Algorithm(Named("network", features(name, head)), classifier or nn.Linear(width, 4))
    content = {
        "args": {"algorithm": "ERM", "test_envs": [0], "holdout_fraction": 0.2, "steps": None, "seed": np.int64(3)},
        "model_input_shape": (3, 224, 224),
        "model_num_classes": 4,
        "model_num_domains": 3,
        "model_hparams": {
            "resnet18": True,
            "resnet_dropout": np.float64(0.1),
            "lr": 5e-5,
            "n_meta_test": np.int32(2),
            "nonlinear_classifier": np.bool_(False),
            "kind": np.str_("big"),
        },
    }
    return trained(algorithm), {**content, "model_dict": algorithm.state_dict()}


def authors(net: tuple[str, str, int] = SMALL) -> tuple[Algorithm, dict]:
    name, head, width = net
    algorithm = Algorithm(features(name, head), Named("fc", nn.Linear(width, 4)))
    args = {"net": "resnet18", "domains": ["art", "photo"], "input_shape": (3, 224, 224), "rsc_f_drop_factor": 1 / 3}
    return trained(algorithm), {"args": args, "model_dict": algorithm.state_dict()}


def saved(content: object, folder: Path) -> Path:
    torch.save(content, folder / "model.pkl")
    return folder / "model.pkl"


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_refused(path: Path, match: str, model: nn.Module | None = None) -> None:
    """A ValueError, and the model's tensors and modes are what they were."""
    model = model or fresh()
    before, modes = tensors(model), [module.training for module in model.modules()]
    with pytest.raises(ValueError, match=match):
        load_external(path, model, EXAMPLE)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]


def test_domainbed_gives_the_same_logits_and_its_settings(tmp_path: Path) -> None:
    algorithm, content = domainbed(RESNET)
    model = fresh(RESNET[0])
    before = set(torch.serialization.get_safe_globals())
    settings = load_external(saved(content, tmp_path), model, EXAMPLE)
    assert torch.equal(model.eval()(EXAMPLE), algorithm(EXAMPLE))
    assert model.bn1.num_batches_tracked == 7
    del content["model_dict"]
    assert settings == content
    for key, kind in (("resnet_dropout", float), ("n_meta_test", int), ("nonlinear_classifier", bool), ("kind", str)):
        assert type(settings["model_hparams"][key]) is kind
    assert set(torch.serialization.get_safe_globals()) == before


def test_numpy_scalars_of_old_versions(tmp_path: Path) -> None:
    """numpy 1 wrote another module's name; what is in the archive is made so by hand."""
    path = saved({"args": {"x": np.float64(0.1)}, "model_dict": {}}, tmp_path)
    old = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(old, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name).replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    path.write_bytes(old.getvalue())
    assert b"numpy.core.multiarray" in path.read_bytes()
    assert read_external(path)["args"] == {"x": 0.1}


@pytest.mark.parametrize("array", [np.arange(3), np.array([object()], dtype=object)], ids=["numbers", "objects"])
def test_numpy_arrays_are_not_settings(array: np.ndarray, tmp_path: Path) -> None:
    assert_refused(saved({"args": {"x": array}, "model_dict": {}}, tmp_path), r"numpy\S+ would have to run")


def test_numpy_scalars_that_hold_objects_are_refused(tmp_path: Path) -> None:
    class Odd:
        def __reduce__(self) -> tuple:
            return np.float64(0).__reduce__()[0], (np.dtype("O"), "text")

    assert_refused(saved({"args": Odd(), "model_dict": {}}, tmp_path), "a numpy value of type 'O8' is not a setting")


def test_what_the_process_allows_for_its_own_files_is_not_allowed_here(tmp_path: Path) -> None:
    path = saved({"args": Path("x"), "model_dict": {}}, tmp_path)
    with torch.serialization.safe_globals([type(Path("x")), Path]):
        before = set(torch.serialization.get_safe_globals())
        assert_refused(path, "Path would have to run. Nothing was executed")
        assert set(torch.serialization.get_safe_globals()) == before


def test_authors_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    algorithm, content = authors(RESNET)
    model = fresh(RESNET[0])
    settings = load_external(saved(content, tmp_path), model, EXAMPLE)
    assert torch.equal(model.eval()(EXAMPLE), algorithm(EXAMPLE))
    assert settings == {"args": content["args"]}


@pytest.mark.parametrize(
    ("name", "head", "wrapper"),
    [
        ("timm/vit_tiny_patch16_224", "head", "vit_backbone"),
        ("timm/mixer_s32_224", "head", "network"),
        ("torchvision/efficientnet_b0", "classifier", "network"),
    ],
)
def test_authors_other_backbones(name: str, head: str, wrapper: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    inner, size = build_network(name, 4, size=32), 32
    width = inner.get_submodule(head)[1].in_features if head == "classifier" else inner.get_submodule(head).in_features
    setattr(inner, head, nn.Identity())
    algorithm = trained(Algorithm(Named(wrapper, inner), Named("fc", nn.Linear(width, 4))))
    x = torch.randn(2, 3, size, size)
    model = build_network(name, 4, size=32)
    load_external(saved({"args": {}, "model_dict": algorithm.state_dict()}, tmp_path), model, x)
    assert torch.equal(model.eval()(x), algorithm(x))


def test_authors_vgg_names_its_layers_anew(tmp_path: Path) -> None:
    class Small(nn.Module):
        """The names of torchvision's VGG, without its size."""

        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
            self.classifier = nn.Sequential(nn.Linear(20, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.features(x))

    theirs, model = Small().eval(), Small()
    state = {}
    for name, tensor in theirs.state_dict().items():
        name = name.replace("classifier.0.", "classifier.classifier0.")
        last = name.startswith("classifier.3.")
        state[name.replace("classifier.3.", "classifier.fc.") if last else f"featurizer.{name}"] = tensor
    load_external(saved({"args": {}, "model_dict": state}, tmp_path), model, EXAMPLE)
    assert torch.equal(model.eval()(EXAMPLE), theirs(EXAMPLE))


@pytest.mark.parametrize("wrap", [None, "state_dict", "model"])
def test_plain_state_dict(wrap: str | None, tmp_path: Path) -> None:
    theirs, model = trained(fresh()), build_network("digits-net", 4)
    state = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    settings = load_external(saved({wrap: state, "epoch": 3} if wrap else state, tmp_path), model, EXAMPLE)
    assert settings == ({"epoch": 3} if wrap else {})
    assert torch.equal(model.eval()(EXAMPLE), theirs(EXAMPLE))


def test_safetensors_and_a_model_with_such_names_itself(tmp_path: Path) -> None:
    """The names of the file are the model's: nothing is renamed."""
    theirs, model = (nn.ModuleDict({"featurizer": nn.Conv2d(3, 2, 3), "classifier": nn.Linear(2, 4)}) for _ in range(2))
    save_file(theirs.state_dict(), tmp_path / "x.safetensors")
    assert load_external(tmp_path / "x.safetensors", model, EXAMPLE) == {}
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), model.parameters(), strict=True))


def test_other_parts_of_an_algorithm_are_ignored_and_named(tmp_path: Path) -> None:
    algorithm, content = domainbed()
    content["model_dict"] |= {"discriminator.input.weight": torch.ones(2), "update_count": torch.tensor([1])}
    model = fresh()
    assert load_external(saved(content, tmp_path), model, EXAMPLE)["ignored"] == ["discriminator", "update_count"]
    assert torch.equal(model.eval()(EXAMPLE), algorithm(EXAMPLE))


def test_counts_of_batch_norm_may_be_missing(tmp_path: Path) -> None:
    algorithm, content = domainbed()
    state = {n: t for n, t in content["model_dict"].items() if not n.endswith("num_batches_tracked")}
    model = fresh()
    load_external(saved({**content, "model_dict": state}, tmp_path), model, EXAMPLE)
    assert torch.equal(model.eval()(EXAMPLE), algorithm(EXAMPLE))


class Evil:
    """Would create a file when it is read by the ordinary reader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("where", ["whole", "args", "model_dict"])
def test_code_in_a_file_is_refused_and_does_not_run(where: str, legacy: bool, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    content = Evil(trace) if where == "whole" else domainbed()[1] | {where: Evil(trace)}
    torch.save(content, tmp_path / "model.pkl", _use_new_zipfile_serialization=not legacy)
    assert_refused(tmp_path / "model.pkl", r"to read it, \S*(getattr|Path)\S* would have to run. Nothing was executed")
    assert not trace.exists()
    torch.load(tmp_path / "model.pkl", weights_only=False)
    assert trace.exists(), "the file was harmless: the test shows nothing"


def test_whole_models_are_refused(tmp_path: Path) -> None:
    assert_refused(saved(nn.Linear(3, 4), tmp_path), r"torch.nn.modules.linear.Linear would have to run")


def test_a_missing_name(tmp_path: Path) -> None:
    _, content = authors()
    for name in ("featurizer.body.4.running_var", "network.0.body.4.running_var"):
        del content["model_dict"][name]
    assert_refused(saved(content, tmp_path), r"does not fit the model: body.4.running_var is missing$")


def test_leftover_names_five_at_most(tmp_path: Path) -> None:
    _, content = domainbed()
    content["model_dict"] |= {f"featurizer.network.extra{i}": torch.ones(2) for i in range(7)}
    assert_refused(saved(content, tmp_path), r"extra0 is unexpected; (extra\d is unexpected; ){4}and 2 more$")


def test_a_leftover_of_the_featurizers_own_head(tmp_path: Path) -> None:
    _, content = domainbed()
    content["model_dict"]["featurizer.network.head.weight"] = torch.ones(4, 128)
    assert_refused(saved(content, tmp_path), "head.weight is given twice")


def test_misshapen_and_mistyped_values(tmp_path: Path) -> None:
    for value, said in ((torch.ones(23), r"\(23,\) torch.float32"), (torch.ones(32).long(), r"\(32,\) torch.int64")):
        _, content = domainbed()
        for name in ("featurizer.network.body.1.weight", "network.0.network.body.1.weight"):
            content["model_dict"][name] = value
        assert_refused(saved(content, tmp_path), rf"body.1.weight is {said}, not \(32,\)")


def test_another_number_of_classes(tmp_path: Path) -> None:
    _, content = domainbed(classifier=nn.Linear(128, 9))
    assert_refused(saved(content, tmp_path), r"head.weight is \(9, 128\)")


def test_copies_under_network_that_differ(tmp_path: Path) -> None:
    _, content = domainbed()
    content["model_dict"]["network.1.bias"] = torch.ones(4)
    assert_refused(saved(content, tmp_path), "network.1.bias is not classifier.bias")
    content["model_dict"]["network.1.bias"] = content["model_dict"]["classifier.bias"]
    content["model_dict"]["network.2.bias"] = torch.ones(4)
    assert_refused(saved(content, tmp_path), "network.2.bias is unexpected")


def test_classifiers_of_several_layers_and_weight_norm(tmp_path: Path) -> None:
    mlp = nn.Sequential(nn.Linear(128, 48), nn.ReLU(), nn.Linear(48, 4))
    _, content = domainbed(classifier=mlp)
    assert_refused(saved(content, tmp_path), r"a classifier that is not one linear layer \(classifier.0.weight,")
    _, content = authors()
    state = {n.replace("fc.weight", "fc.weight_v"): t for n, t in content["model_dict"].items()}
    assert_refused(saved({**content, "model_dict": state}, tmp_path), "is not one linear layer")
    state = {n: t for n, t in state.items() if "fc." not in n}
    assert_refused(saved({**content, "model_dict": state}, tmp_path), r"is not one linear layer \(none\)")


def test_a_model_without_a_head(tmp_path: Path) -> None:
    model = nn.Sequential(fresh(), nn.Softmax(dim=1))
    with pytest.raises(HeadNotFoundError):
        load_external(saved(domainbed()[1], tmp_path), model, EXAMPLE)


@pytest.mark.parametrize("content", [{}, {"args": {}}, {"args": {}, "model_dict": {}}, 3, [torch.ones(2)]])
def test_files_without_a_state_dict(content: object, tmp_path: Path) -> None:
    assert_refused(saved(content, tmp_path), "holds no state dict but")


@pytest.mark.parametrize("cut", [0, 10, 1000, 5000, -200])
def test_damaged_files(cut: int, tmp_path: Path) -> None:
    path = saved(fresh().state_dict(), tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    assert_refused(path, "is not a torch checkpoint, or was cut off")


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_text("hello, world")
    assert_refused(tmp_path / "x.pkl", "is not a torch checkpoint, or was cut off")
    (tmp_path / "x.safetensors").write_text("hello, world")
    assert_refused(tmp_path / "x.safetensors", "is not a safetensors file, or was cut off")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_external(tmp_path / "none", fresh(), EXAMPLE)
