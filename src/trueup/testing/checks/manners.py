"""Checks of what a method must leave alone, and of its description."""

import ast
import copy
import dataclasses
import inspect
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trueup.core.adapter import Adapter
from trueup.testing.case import Case, check, difference, frozen_tensors, play, raises, same


@check
def source_untouched(case: Case) -> None:
    """Check that the user's model stays as it is: values, flags, modes, gradients."""
    model = case.model().train()
    model.get_parameter("conv0.weight").requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    flags = [p.requires_grad for p in model.parameters()]
    adapter = case.adapter(model)
    play(adapter, case.stream(3))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert flags == [p.requires_grad for p in model.parameters()]
    assert flags == [p.requires_grad for p in adapter.unwrap().parameters()]
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


@check
def only_selected_change(case: Case) -> None:
    """Of the model only the selected parameters change; by default something does, where the method learns."""
    choices: tuple[Any, ...] = ("norm", "head", "backbone", "all", r"conv\d", _is_bias) if case.learns else ()
    for hyper in ({}, *({"params": params} for params in choices)):
        adapter = case.adapter(**hyper)
        before = {n: p.clone() for n, p in adapter.net.model.named_parameters()}
        play(adapter, case.stream(3))
        changed = {n for n, p in adapter.net.model.named_parameters() if not torch.equal(p, before[n])}
        allowed = _expected_names(getattr(adapter.method, "params", "none"))
        assert changed <= allowed, f"{hyper}: {sorted(changed - allowed)} changed"
        assert bool(changed) == case.learns, f"{hyper}: nothing changed"
        assert bool(adapter.updates) == case.learns, f"{hyper}: no update was counted"


def _is_bias(name: str) -> bool:
    return name.endswith("bias")


def _expected_names(params: Any) -> set[str]:
    """Written by hand for the tiny network."""
    conv, norm = {"conv0.weight", "conv1.weight"}, {f"bn{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}
    head = {"head.weight", "head.bias"}
    by_hand: dict[Any, set[str]] = {"none": set(), "norm": norm, "head": head, "all": conv | norm | head}
    by_hand |= {"backbone": conv | norm, r"conv\d": conv, _is_bias: {"bn0.bias", "bn1.bias", "head.bias"}}
    return by_hand[params]


@check
def no_hooks_left(case: Case) -> None:
    """No hook stays on any module, also after an exception."""
    model = case.model()
    adapter = case.adapter(model)

    def hooks() -> int:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        modules = [*model.modules(), *adapter.modules()]
        return sum(len(getattr(m, kind)) for m in modules for kind in kinds)

    play(adapter, case.stream(2))
    assert hooks() == 0
    for x in (torch.zeros(4, 2, 16, 16), torch.full((4, 3, 16, 16), torch.nan)):
        _refused(adapter, x)
    assert hooks() == 0


@check
def bad_input_changes_nothing(case: Case) -> None:
    """Check that bad input raises a clear error and leaves the adapter as it was."""
    good = case.stream(1)[0]
    nan, infinite = good.clone(), good.clone()
    nan[3, 0, 2, 2], infinite[0, 1, 0, 0] = torch.nan, -torch.inf
    bad = [nan, infinite, good[:0], good[0], good[:, :2], good.double(), (good * 50).to(torch.uint8), good.to("meta")]
    adapter = case.adapter()
    for x in bad:
        _refused(adapter, x)  # also as the very first batch
    adapter(good)
    before = copy.deepcopy(adapter)
    for x in bad:
        _refused(adapter, x)
    with raises(TypeError, "a string was taken"):
        adapter("an image")
    assert difference(before, adapter) == []
    assert all(t.isfinite().all() for t in frozen_tensors(adapter))


def _refused(adapter: Adapter, x: Tensor) -> None:
    with raises(ValueError, f"{tuple(x.shape)} {x.dtype} on {x.device} was taken"):
        adapter(x)


@check
def guard_only_watches(case: Case) -> None:
    """Check that a guard changes no bit of the answers while nothing is wrong."""
    xs = case.stream(6)
    assert same(play(case.adapter(), xs), play(case.adapter(guard=True), xs))


@check
def bad_rows_disturb_nobody(case: Case) -> None:
    """Check that rows with NaN, infinite or huge values are answered by zeros, the others as if alone."""
    xs = case.stream(4)
    adapter, twin = case.adapter(guard=True), case.adapter(guard=True)
    for i, x in enumerate(xs):
        bad = torch.zeros(len(x), dtype=torch.bool)
        bad[[i, 7, -1]] = True
        harmed = x.clone()
        harmed[i, ..., 0, 0] = torch.nan
        harmed[7, ..., 1, 1] = -torch.inf
        harmed[-1] *= 1e6
        answer = adapter(harmed)
        assert not answer[bad].any()
        assert torch.equal(answer[~bad], twin(x[~bad]))
        assert adapter.health.quarantined == tuple(bad.nonzero().flatten().tolist())


@check
def random_stream_untouched(case: Case) -> None:
    """Check that the user's random numbers are the same with and without the adapter."""
    adapter, xs = case.adapter(), case.stream(3)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    play(adapter, xs)
    adapter.reset()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(np.random.get_state()))


@check
def own_random_stream(case: Case) -> None:
    """Check that random numbers drawn by the user do not change the adapter's answers."""
    a, b, xs = case.adapter(), case.adapter(), case.stream(3)
    for x in xs:
        expected = a(x)
        torch.rand(7)
        assert torch.equal(expected, b(x))


@check
def mode_proof(case: Case) -> None:
    """train() and eval() on the adapter, or on something that holds it, change nothing."""
    a, b = case.adapter(), case.adapter()
    modes = (b, True), (nn.Sequential(b), False), (nn.Sequential(b), True)
    for (module, training), x in zip(modes, case.stream(3), strict=True):
        module.train(training)
        assert torch.equal(a(x), b(x))
    assert difference(a, b) == []


@check
def hyperparameters_round_trip(case: Case) -> None:
    """Check that a method is a frozen value: equal when built again from its hyper-parameters, and shown with them."""
    method = case.method(**case.hyper)
    assert type(method)(**method.hyperparameters()) == method
    assert dataclasses.replace(method, episodic=True) != method
    assert hash(method) == hash(type(method)(**method.hyperparameters()))
    with raises(dataclasses.FrozenInstanceError, "the method can be changed"):
        method.norm = "batch"  # type: ignore[misc]
    shown = repr(case.adapter())
    assert all(f"{name}={value!r}" in shown for name, value in method.hyperparameters().items())


@check
def documented(case: Case) -> None:
    """Name, paper and tasks are stated; the class and every hyper-parameter have a docstring."""
    info = case.method.info
    assert all((info.name, info.title, info.paper, info.tasks))
    told: set[str] = set()
    for cls in case.method.__mro__:
        if cls.__module__ == "builtins":
            continue
        body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        assert ast.get_docstring(body), f"{cls.__name__} has no docstring"
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                told |= {field.target.id} if is_text else set()
    missing = {f.name for f in dataclasses.fields(case.method)} - told
    assert not missing, f"no docstring: {sorted(missing)}"
