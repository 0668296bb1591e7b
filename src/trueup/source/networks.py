"""Networks by name: of torchvision, timm, smp, this library, or a user's own; with or without weights."""

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trueup.source.architectures import DigitsNet, ResNet26, SmallUNet
from trueup.source.external_checkpoints import find_misfits, find_state_dict, probe_head, read_external, refuse_misfits

LIBRARIES = ("torchvision", "timm")
ENCODER = "mobilenet_v2"  # of smp by default: the paper's, and small


def build_network(name: str, classes: int, *, weights: str = "none", size: int = 224, channels: int = 3) -> nn.Module:
    """Build a network for images of `size` pixels; a head that the weights do not fit is initialised by torch.

    `name`: "resnet50", "timm/mixer_l16_224", "digits-net", "package.module:function" (called with the classes); for
    masks "smp:deeplabv3plus/mobilenet_v2", "deeplabv3_resnet50", "small-unet".
    `weights`: "none", "imagenet" (torchvision's IMAGENET1K_V1, timm's defaults), or the file of a state dict.
    `channels`: of the images; a user's own function must support them by itself.
    """
    if classes < 1:
        raise ValueError(f"a network needs at least one output, not {classes}")
    if weights not in ("none", "imagenet") and not Path(weights).is_file():
        raise ValueError(f'weights={weights!r} must be "none", "imagenet" or an existing file')
    library, short = find_network(name)
    options = _channel_options(library, short, channels)
    if weights == "imagenet":
        return _pretrained(library, short, classes, size, channels)
    if library == "smp":
        model = make_smp(short, classes, **options)
    elif library in LIBRARIES:
        model = _create(library, short, size, num_classes=classes, **options)
    else:
        model = OWN[short](classes, channels) if library == "own" else _call(short, classes)
    if weights != "none":
        _fill(model, weights, size, channels)
    return model


def _channel_options(library: str, name: str, channels: int) -> dict[str, Any]:
    """Return the library's option for a number of channels other than three."""
    if channels != 3 and library == "torchvision":
        raise ValueError(
            f"torchvision's {name} takes three channels, not {channels}: use one of timm (timm/NAME), or your own "
            f"package.module:function"
        )
    words = {"timm": "in_chans", "smp": "in_channels"}
    return {words[library]: channels} if channels != 3 and library in words else {}


def network_code(name: str) -> str:
    """Return the hash of a user's own network file; empty for other networks."""
    if ":" not in name or name.startswith("smp:"):
        return ""
    module = name.partition(":")[0]
    with current_folder_importable(), suppress(ModuleNotFoundError, ValueError):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            return f"sha256:{hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]}"
    raise ValueError(f"{name!r}: there is no module {module!r}, installed or in the current folder")


def find_network(name: str) -> tuple[str, str]:
    """Return the library of a network and its name there; refuse an unknown name. No function of a user is called."""
    if name.startswith("smp:"):
        check_smp(name)
        return "smp", name
    if ":" in name:
        return "factory", name
    if name in OWN:
        return "own", name
    library, slash, short = name.partition("/")
    prefix, known = f"{library}/", set[str]()
    if not slash or library not in LIBRARIES:
        library, prefix, short, known = "", "", name, set(OWN)
    for each in (library,) if library else LIBRARIES:
        names = _names(each)
        if short in names or (each == "timm" and _in_timm(short)):
            return each, short
        known |= names
    raise ValueError(
        f"no network is called {name!r}{_similar(short, known, prefix)} There are torchvision's and timm's, "
        f"{', '.join(OWN)}, smp:ARCHITECTURE/ENCODER, and your own as package.module:function"
    )


def _names(library: str) -> set[str]:
    """Return the classification networks of a library, and torchvision's for segmentation."""
    if library == "timm":
        return set(_library("timm").list_models())
    models = _library("torchvision").models
    return {name for module in (models, models.segmentation) for name in models.list_models(module=module)}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = "models" if name in LIBRARIES else "seg"
        raise ImportError(f"{name} is not installed: pip install 'trueup[{extra}]'") from error


def _similar(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message: a question with the most similar name, or a full stop."""
    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {prefix + near[0]!r}?" if near else "."


def check_smp(name: str) -> tuple[str, str]:
    """Return architecture and encoder of "smp:deeplabv3plus/mobilenet_v2"; the encoder is optional."""
    smp = _library("segmentation_models_pytorch")
    short, _, encoder = name.removeprefix("smp:").partition("/")
    base = smp.base.SegmentationModel
    known = {n.lower() for n, kind in vars(smp).items() if isinstance(kind, type) and issubclass(kind, base)}
    _among(short.lower(), known, "architecture", name)
    if not encoder.startswith("tu-"):  # timm's encoders, which smp does not list
        _among(encoder or ENCODER, set(smp.encoders.get_encoder_names()), "encoder", name)
    return short.lower(), encoder or ENCODER


def make_smp(name: str, channels: int, **options: Any) -> nn.Module:
    """Build a network of segmentation_models_pytorch, without weights unless options give some."""
    arch, encoder = check_smp(name)
    library, options = _library("segmentation_models_pytorch"), {"encoder_weights": None, **options}
    model: nn.Module = library.create_model(arch, encoder, classes=channels, **options)
    return model


def _among(word: str, known: set[str], kind: str, name: str) -> None:
    if word not in known:
        raise ValueError(f"{name!r}: segmentation_models_pytorch has no {kind} {word!r}{_similar(word, known)}")


def _is_segmenter(library: str, name: str) -> bool:
    """Return True for torchvision's networks for segmentation."""
    models = _library("torchvision").models
    return library == "torchvision" and name in models.list_models(module=models.segmentation)


def _in_timm(name: str) -> bool:
    """Return True if timm accepts a name that it does not list: an old one, or one with a tag of weights."""
    timm = _library("timm")
    try:
        return bool(timm.is_model(name)) and (timm.get_pretrained_cfg(name) is not None or "." not in name)
    except RuntimeError:  # an unknown tag of a known network
        return False


def _create(library: str, name: str, size: int, **options: Any) -> nn.Module:
    """Create a library's network; those with a fixed input size get ours."""
    model: nn.Module
    if library == "timm":
        timm = _library("timm")
        config = timm.get_pretrained_cfg(name)
        if config is not None and config.fixed_input_size and config.input_size[-1] != size:
            options["img_size"] = size
        model = timm.create_model(name, **options)
    else:
        if name.startswith("vit_") and size != 224:
            options["image_size"] = size
        if _is_segmenter(library, name):
            options.setdefault("weights_backbone", None)
        model = _library("torchvision").models.get_model(name, **options)
    return model


def _pretrained(library: str, name: str, classes: int, size: int, channels: int) -> nn.Module:
    """Create a network with the library's own weights; the head stays if the number of classes fits."""
    inputs = _channel_options(library, name, channels)
    if library == "smp":
        return _downloaded(name, lambda: make_smp(name, classes, **inputs, encoder_weights="imagenet"))
    if library not in LIBRARIES:
        raise ValueError(f"{name!r} has no ImageNet weights; give a file of weights")
    if _is_segmenter(library, name):
        backbone = {"num_classes": classes, "weights_backbone": "DEFAULT"}
        return _downloaded(name, lambda: _create(library, name, size, **backbone))
    options = {"pretrained": True} if library == "timm" else {"weights": "IMAGENET1K_V1"}
    model = _downloaded(name, lambda: _create(library, name, size, **options, **inputs))
    layer = model.get_submodule(probe_head(model, _example(size, channels)))
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    if len(weight) != classes:
        layer.weight = nn.Parameter(weight.new_empty(classes, *weight.shape[1:]))
        layer.bias = nn.Parameter(weight.new_empty(classes)) if bias is not None else None
        setattr(layer, "out_features" if isinstance(layer, nn.Linear) else "out_channels", classes)
        _initialize(layer)
        if hasattr(model, "num_classes"):
            setattr(model, "num_classes", classes)  # noqa: B010 - timm's attribute; torch types all as modules
    return model


def _downloaded(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    try:
        return make()
    except Exception as error:  # each library and its downloader has its own errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise OSError(
            f"the ImageNet weights of {name!r} could not be loaded: {reason}; "
            f"if you are offline, give a local file of weights instead, or none"
        ) from error


def _fill(model: nn.Module, path: str, size: int, channels: int) -> None:
    """Load a state dict. A head with another number of classes, or none, is initialised again."""
    ours, theirs = model.state_dict(), find_state_dict(read_external(path), path)
    layer = None
    if find_misfits(ours, theirs):
        head = probe_head(model, _example(size, channels))
        mine = {f"{head}.weight", f"{head}.bias"} & ours.keys()
        weight = theirs.get(f"{head}.weight")
        if not mine & theirs.keys() or (weight is not None and weight.shape != ours[f"{head}.weight"].shape):
            layer = model.get_submodule(head)
            ours = {name: tensor for name, tensor in ours.items() if name not in mine}
            theirs = {name: tensor for name, tensor in theirs.items() if name not in mine}
        refuse_misfits(find_misfits(ours, theirs), path)
    model.load_state_dict(theirs, strict=False)
    if layer is not None:
        _initialize(layer)


def _initialize(layer: nn.Module) -> None:
    """Initialise a layer as torch does: some libraries start their heads with zeros."""
    assert isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
    layer.reset_parameters()


def _example(size: int, channels: int) -> Tensor:
    """Return two images without using torch's random state."""
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


def _call(name: str, classes: int) -> nn.Module:
    """Build a user's own network, from a module that is installed or in the current folder."""
    where, _, what = name.partition(":")
    if not where.strip(".") or where.startswith(".") or not what.isidentifier():
        raise ValueError(f"{name!r} is not of the form package.module:function")
    with current_folder_importable():
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if f"{where}.".startswith(f"{error.name}."):
                raise ValueError(f"{name!r}: there is no module {where!r}, installed or in {Path.cwd()}") from error
            raise  # the module exists; something that it imports does not
        function = getattr(module, what, None)
        if not callable(function):
            hint = _similar(what, vars(module)).rstrip(".")
            raise ValueError(f"{name!r}: {where} has no function {what!r}{hint}")
        model = function(classes)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Put the current folder first on the import path, as with python -m."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)


OWN: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet26-cifar": ResNet26,
    "digits-net": DigitsNet,
    "small-unet": SmallUNet,
}
