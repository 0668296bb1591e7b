"""An adapter's whole state as named tensors and a header, and back again."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trueup.core import files
from trueup.core.building import build, fresh_state
from trueup.core.copying import assign_tensor, laid_out_like, networks, shared
from trueup.core.method import GradientMethod
from trueup.core.moments import Moment
from trueup.core.registry import for_task
from trueup.norm.batch import BatchPolicy
from trueup.validate import check_int
from trueup.version import __version__

if TYPE_CHECKING:
    from trueup.core.adapter import Adapter
    from trueup.core.method import Method

# What must be the same on both sides, and how to say it when it is not.
IDENTITY = {
    "method": "another method",
    "multilabel": "a model whose outputs are read otherwise (multilabel)",
    "hyperparameters": "other hyper-parameters",
    "seed": "another seed",
    "parameters": "other parameters to update",
    "source": "another source model",
    "guard": "another guard, or none",
    "pixels": "images that were normalised otherwise (mean, std)",
}
USUAL = {"precision": "float32", "channels_last": False}  # what may be measured, as it is if nothing is


def _source_digest(adapter: Adapter) -> str:
    """SHA-256 of the source model, worked out once."""
    if not adapter._digest:
        model = adapter.net.model
        buffers = {} if adapter._built else dict(model.named_buffers())  # once built they are in the source
        adapter._digest = files.digest({**dict(model.named_parameters()), **buffers, **adapter._source})
    return adapter._digest


def save(adapter: Adapter, path: str | Path) -> None:
    """Write the state to a file, which only its owner may read if it holds images or features."""
    info = adapter.method.info
    if info.images:
        adapter._warn_once("a state of %s holds images of the stream: guard it as you guard them", info.name)
    files.write(path, *capture(adapter), "adapter", info.private)


def load(adapter: Adapter, path: str | Path) -> None:
    """Continue from a file; a foreign or damaged one changes nothing."""
    with torch.inference_mode(False):
        restore(adapter, *files.read(path), path)


def capture(adapter: Adapter) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Only what changed of the model; all of the method's state, the optimiser's and the random stream's."""
    if not adapter._built:
        raise ValueError("there is nothing to save before the first batch; pass example= to adapt")
    tensors = {f"net/{n}": t for n, t in adapter._mutable_tensors().items() if not torch.equal(t, adapter._source[n])}
    tensors |= {f"state/{n}": t for n, t in _tensors(adapter.state).items()}
    tensors |= {f"policy/{n}": t for n, t in adapter.net.policy.state_dict().items()}
    if adapter._prepared:
        tensors |= {f"fresh/{n}": t for n, t in _tensors(adapter._fresh[0]).items()}
    tensors |= {f"random/{device}": t for device, t in adapter._random.states.items()}
    moved, optimizer = _split(_optimizer_state(adapter))
    tensors |= {f"optimizer/{n}": t for n, t in moved.items()}
    header = {
        "version": __version__,
        "head": adapter.net.head,
        "classes": adapter.net.channels,
        "task": adapter.task,
        "batches": adapter.batches,
        "images": adapter.images,
        "updates": adapter.updates,
        "shrunk": adapter.net.runner.steps.shrunk,
        "prepared": adapter._prepared,
        "engine": {key: getattr(adapter.net.runner.settings, key) for key in USUAL},
        "optimizer": optimizer,
        **_identity(adapter, adapter.method),
    }
    if adapter._watch is not None:
        header["watch"] = {"marks": adapter._watch.marks, "kept": []}
        tensors |= {f"watch/{n}": t for n, t in adapter._watch.memory.state_dict().items()}
        for i, moment in enumerate(adapter._watch.kept):
            parts, scalars = _of_moment(moment, adapter._source)
            tensors |= {f"kept{i}/{n}": t for n, t in parts.items()}
            header["watch"]["kept"].append(scalars)
    return tensors, header


def restore(adapter: Adapter, tensors: dict[str, Tensor], header: dict[str, Any], path: str | Path) -> None:
    """Take over a captured state. A copy does so first: a file that is wrong somewhere changes nothing."""
    # Older files do not say all of it.
    usual = {"multilabel": False, "guard": "", "task": "classification", "pixels": "", "engine": USUAL}
    header = {**usual, "shrunk": 0, "images": 0, **header}
    twin = copy.deepcopy(adapter, shared(adapter) if adapter._built else {})
    twin._keeper, twin._lock = adapter._keeper, adapter._lock
    try:
        _refuse_foreign(adapter, header, path)
        found = twin.net.runner.settings.open or twin.net.runner.settings.measured
        if found:  # or else it was said how to run
            engine = replace(twin.net.runner.settings, measured=found, **{key: header["engine"][key] for key in found})
            if engine.open:
                raise ValueError(f"{path} does not say how its model ran: {_brief(header['engine'])}")
            for net in networks(twin):
                net.use(engine)
        if not adapter._built:
            check_int("classes", header["classes"], 1)
            build(twin, header["head"], header["classes"], header["task"])
            _refuse_foreign(twin, header, path)
        _take_over(twin, tensors, header, path)
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} holds no state of this adapter: {type(error).__name__}: {error}") from error
    adapter.__dict__ = twin.__dict__


def _take_over(adapter: Adapter, tensors: dict[str, Tensor], header: dict[str, Any], path: str | Path) -> None:
    for count in ("batches", "images", "updates", "shrunk"):
        check_int(count, header[count], 0)
    parts: dict[str, dict[str, Tensor]] = {
        part: {} for part in ("net", "state", "policy", "fresh", "random", "optimizer", "watch", "kept0", "kept1")
    }
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = tensor
    _fits("net", adapter._mutable_tensors(), parts["net"], path, whole=False)
    _complete(adapter, parts)
    _fits("policy", adapter.net.policy.state_dict(), parts["policy"], path, whole=True)
    for part in ("state", "fresh") if header["prepared"] else ("state",):
        _fits(part, _tensors(adapter._fresh[0]), parts[part], path, whole=True)

    with torch.no_grad():
        adapter.reset()
        if header["prepared"]:
            _assign(adapter._fresh[0], parts["fresh"])
        elif adapter._prepared:
            adapter._fresh = (fresh_state(adapter),)
        adapter._prepared = header["prepared"]
        adapter.reset()
        for name, target in adapter._mutable_tensors().items():
            if name in parts["net"]:
                assign_tensor(adapter.net.model, name, target, parts["net"][name])
        _assign(adapter.state, parts["state"])
        for module in adapter.state.modules():
            verify = getattr(module, "verify", None)
            if verify is not None:
                verify()
        adapter.net.policy.load_state_dict(parts["policy"])
        _assign_optimizer(adapter, parts["optimizer"], header["optimizer"])
        if adapter._watch is not None:
            adapter._watch.load(adapter, header["watch"]["marks"], parts["watch"])
            kept = enumerate(header["watch"]["kept"])
            adapter._watch.kept = [_to_moment(adapter, parts[f"kept{i}"], scalars, path) for i, scalars in kept]
    for device, state in parts["random"].items():
        torch.Generator(device).set_state(state)
    adapter._random.states = parts["random"]
    adapter.batches, adapter.images = header["batches"], header["images"]
    adapter.net.runner.steps.count = header["updates"]
    adapter.net.runner.steps.shrunk = header["shrunk"]


def _complete(adapter: Adapter, parts: dict[str, dict[str, Tensor]]) -> None:
    """Fill in, as in a fresh adapter, the statistics for unwrap() that older files do not have."""
    if not parts["policy"] and isinstance(adapter.net.policy, BatchPolicy):
        parts["policy"] = {n: torch.zeros_like(t) for n, t in adapter.net.policy.state_dict().items()}
    fresh = adapter._fresh[0]
    added = {
        f"{path}.{name}": t
        for path, module in fresh.named_modules()
        if isinstance(module, BatchPolicy)
        for name, t in module.named_buffers()
    }
    for part in ("state", "fresh"):
        if parts.get(part):
            parts[part] = {**added, **parts[part]}


def _refuse_foreign(adapter: Adapter, header: dict[str, Any], path: str | Path) -> None:
    method = adapter.method if adapter._built else for_task(adapter.method, adapter._given, header["task"])
    ours = _identity(adapter, method)
    theirs = {**header, "hyperparameters": {**_defaults(method), **header["hyperparameters"]}}
    for key, reason in IDENTITY.items():
        if ours[key] != theirs[key] and (key != "parameters" or adapter._built):
            there, here = _apart(theirs[key], ours[key])
            raise ValueError(f"{path} belongs to {reason}: {_brief(there)}, here {_brief(here)}")
    head = adapter.net.head if adapter._built else adapter._head
    if head != header["head"] and (adapter._built or head is not None):
        raise ValueError(f"{path} has the head {header['head']!r}, this adapter {head!r}")


def _identity(adapter: Adapter, method: Method) -> dict[str, Any]:
    """What must agree; the hyper-parameters as JSON gives them back, a function by what it selected."""
    hyper = {k: "a function" if callable(v) else v for k, v in method.hyperparameters().items()}
    return {
        "method": method.info.name,
        "multilabel": adapter.multilabel,
        "hyperparameters": json.loads(json.dumps(hyper)),
        "seed": adapter._random.seed,
        "parameters": list(adapter.net.selected),
        "source": _source_digest(adapter)[:16],
        "guard": "" if adapter._watch is None else repr(adapter._watch.guard),
        "pixels": "" if adapter.net.normalization is None else repr(adapter.net.normalization),
    }


def _defaults(method: Method) -> dict[str, Any]:
    """Of hyper-parameters that came later than some files; their own word wins."""
    return {"search": "exact"} if "search" in method.hyperparameters() else {}


def _apart(there: Any, here: Any) -> tuple[Any, Any]:
    """Of two dicts what they do not share."""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return there, here
    return {k: v for k, v in there.items() if here.get(k, v) != v or k not in here}, {
        k: v for k, v in here.items() if there.get(k, v) != v or k not in there
    }


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _fits(part: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], path: str | Path, *, whole: bool) -> None:
    """Names, dtypes and shapes must fit; buffers may have grown."""
    if theirs.keys() - ours.keys() or (whole and ours.keys() - theirs.keys()):
        names = sorted(ours.keys() ^ theirs.keys())
        raise ValueError(f"{path} does not fit: its {part} differs in {_brief(names)}")
    for name, tensor in theirs.items():
        mine = ours[name]
        same = tensor.shape == mine.shape if isinstance(mine, nn.Parameter) else tensor.ndim == mine.ndim
        if not same or tensor.dtype != mine.dtype:
            raise ValueError(f"{path} does not fit: {part} {name} is {tuple(tensor.shape)} {tensor.dtype}")


def _assign(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy into parameters; put new buffers in place of the old, whose shape may differ."""
    mine = _tensors(module)
    for name, tensor in tensors.items():
        if isinstance(mine[name], nn.Parameter):
            mine[name].copy_(tensor)
        else:
            prefix, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(prefix), leaf, tensor.to(mine[name].device, copy=True))


def _optimizer_state(adapter: Adapter) -> dict[int, dict[str, Any]]:
    if adapter._optimizer is None:
        return {}
    parameters = [p for group in adapter._optimizer.param_groups for p in group["params"]]
    return {i: adapter._optimizer.state[p] for i, p in enumerate(parameters) if p in adapter._optimizer.state}


def _split(states: dict[int, dict[str, Any]]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """An optimiser's state as named tensors and plain values."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for i, values in states.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{i}/{key}"] = value
            else:
                scalars.setdefault(str(i), {})[key] = value
    return tensors, scalars


def _assign_optimizer(adapter: Adapter, tensors: dict[str, Tensor], scalars: dict[str, dict[str, Any]]) -> None:
    if adapter._optimizer is not None:
        adapter._optimizer.load_state_dict(_joined(adapter, adapter._optimizer, tensors, scalars))
    elif tensors or scalars:
        raise ValueError("there is no optimiser whose state this could be")


def _joined(
    adapter: Adapter, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], scalars: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """An optimiser's state for `load_state_dict`, checked: a fused step writes as far as the parameter is long."""
    state: dict[int, dict[str, Any]] = {int(i): dict(values) for i, values in scalars.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in tensors.items():
        i, _, key = name.partition("/")
        state.setdefault(int(i), {})[key] = laid_out_like(tensor, parameters[int(i)])
    usual = _usual(adapter)
    for at, values in state.items():
        if not 0 <= at < len(parameters) or values.keys() != usual.keys():
            raise ValueError(f"parameter {at} has {sorted(values)} in the optimiser, not {sorted(usual)}")
        for key, value in values.items():
            shape = parameters[at].shape if isinstance(usual[key], Tensor) and usual[key].ndim else torch.Size()
            if isinstance(value, Tensor) != isinstance(usual[key], Tensor):
                raise ValueError(f"{key} of parameter {at} is a {type(value).__name__}")
            if isinstance(value, Tensor) and (value.shape != shape or not value.is_floating_point()):
                raise ValueError(f"{key} of parameter {at} is {tuple(value.shape)} {value.dtype}")
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _usual(adapter: Adapter) -> dict[str, Any]:
    """What the method's optimiser keeps of a parameter, found out with a small one."""
    assert isinstance(adapter.method, GradientMethod)
    like = next(iter(adapter.net.selected.values()), torch.empty(0))
    trial = nn.Parameter(torch.zeros(2, dtype=like.dtype, device=like.device))
    optimizer = adapter.method.optimizer([("trial", trial)])
    trial.grad = torch.zeros_like(trial)
    optimizer.step()
    return dict(optimizer.state[trial])


def _of_moment(moment: Moment, source: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, scalars = _split(moment.optimizer.get("state", {}))
    named = {f"optimizer/{n}": t for n, t in tensors.items()}
    named |= {f"net/{n}": t for n, t in moment.net.items() if not torch.equal(t, source[n])}
    named |= {f"state/{n}": t for n, t in _tensors(moment.state).items()}
    return named | {f"policy/{n}": t for n, t in moment.policy.items()}, scalars


def _to_moment(adapter: Adapter, tensors: dict[str, Tensor], scalars: dict[str, Any], path: str | Path) -> Moment:
    parts: dict[str, dict[str, Tensor]] = {"net": {}, "state": {}, "policy": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = tensor
    _complete(adapter, parts)
    _fits("net", adapter._mutable_tensors(), parts["net"], path, whole=False)
    _fits("state", _tensors(adapter._fresh[0]), parts["state"], path, whole=True)
    _fits("policy", adapter.net.policy.state_dict(), parts["policy"], path, whole=True)
    if not all(bool(t.isfinite().all()) for t in parts["net"].values() if t.is_floating_point()):
        raise ValueError(f"{path} does not fit: a state to go back to is not finite")
    net = {name: parts["net"].get(name, t).to(t.device, copy=True) for name, t in adapter._source.items()}
    state = copy.deepcopy(adapter._fresh[0])
    _assign(state, parts["state"])
    optimizer = {} if adapter._optimizer is None else _joined(adapter, adapter._optimizer, parts["optimizer"], scalars)
    return Moment(net, state, parts["policy"], optimizer)


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
