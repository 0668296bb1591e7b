"""The methods as a page of documentation, made of what each says of itself."""

from __future__ import annotations

import inspect
import io
import tokenize
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from trueup import views as augment
from trueup.core.method import GradientMethod, Method
from trueup.core.registry import get_method, list_methods

TASKS = {"classification": "images", "segmentation": "pixels"}
HEADS = ("method", "updates", "statistics", "passes per image", "remembers", "tasks", "source data", "paper")
WORDS = {
    "none": "nothing", "norm": "norms", "head": "the head", "backbone": "all but the head", "all": "everything",
}  # fmt: skip
INTRO = """# Methods

Made by `trueup list methods --markdown` of what each method says of itself. *Statistics* are those of BatchNorm layers
by default; any method takes any of them with `norm=`. *Passes* are forward and backward passes of the network for an
image. *Source data* are wanted before deployment, never after.

Methods compose without new classes: any loss with any statistics (`adapt(model, "tent", norm="mix:0.1")`), with a reset
or an ensemble of weights by rules of a guard (`guard=Guard(rules=(RDumb(), Roid()))` of `trueup.rules`), and with
`preset="safe"`.

*Differs* marks where the code departs from the paper or from published code, in the words of the source. *Published
settings* are given where they differ from the defaults, with the repository in which they were read.
"""


def each() -> Iterator[tuple[str, list[str], Method]]:
    """Every method with what it is for; one that has a class for images and another for pixels comes twice."""
    for name in list_methods():
        classes: dict[type[Method], list[str]] = {}
        for task, word in TASKS.items():
            if name in list_methods(task):
                classes.setdefault(get_method(name, task), []).append(word)
        for cls, words in classes.items():
            yield name, words, cls()


def row(name: str, tasks: list[str], method: Method) -> tuple[str, ...]:
    """What the table says of a method."""
    info = method.info
    params = str(method.hyperparameters().get("params", "none"))
    updates = "what it adds" if params == "none" and isinstance(method, GradientMethod) else WORDS.get(params, params)
    return (
        name, updates, method.norm, info.passes, info.memory, ", ".join(tasks),
        "yes" if "prepare" in info.needs else "no", info.paper,
    )  # fmt: skip


def page() -> str:
    """The table of all methods, and a section for each."""
    rows = {name: row(name, tasks, method) for name, tasks, method in reversed(list(each()))}
    both: dict[str, list[str]] = {}
    for name, tasks, _ in each():
        both.setdefault(name, []).extend(tasks)
    lines = [INTRO, f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    for name in list_methods():
        cells = list(rows[name])
        cells[0], cells[5] = f"[`{name}`](#{name})", ", ".join(both[name])
        lines.append(f"| {' | '.join(cells)} |")
    for name in list_methods():
        lines += ["", *section(name)]
    lines += [
        "",
        "## Views",
        "",
        "Views of images are drawn for `cotta`, `rotta`, `roid`, `memo` and `adacontrast`.",
        "",
    ]
    lines += [f"- *Differs:* {text}" for text in differences(augment)]
    return "\n".join(lines) + "\n"


def section(name: str) -> list[str]:
    """A method in a few paragraphs: what it computes, its defaults, when it works and when it breaks."""
    cls = get_method(name)
    info, method = cls.info, cls()
    lines = [
        f"## {name}",
        "",
        f"**{info.title}.** {info.paper}.",
        "",
        *inspect.cleandoc(cls.__doc__ or "").splitlines(),
        "",
    ]
    own = {key: value for key, value in method.hyperparameters().items() if key != "episodic"}
    lines += [f"Defaults: {', '.join(f'`{key}={_said(value)}`' for key, value in own.items())}.", ""]
    lines += [f"*Works:* {info.works}", "", f"*Breaks:* {info.breaks}"]
    if info.images:
        lines += ["", "It keeps images of your users, in memory and in saved states."]
    if info.unfit:
        lines += ["", f"Not for pixels: {info.unfit}."]
    if info.settings:
        lines += ["", f"*Published settings:* {info.settings}"]
    classes = [get_method(name, task) for task in TASKS if name in list_methods(task)]
    modules = dict.fromkeys(
        inspect.getmodule(base) for c in classes for base in reversed(c.__mro__) if _of_methods(base)
    )
    texts = [f"- *Differs:* {text}" for module in modules if module is not None for text in differences(module)]
    return lines + (["", *texts] if texts else [])


def differences(module: ModuleType) -> list[str]:
    """Read the departures that a module's comments mark with `Differs:`, each to the line that ends a sentence."""
    texts: list[str] = []
    unfinished = -1  # the line on which the last text goes on
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(module)).readline):
        if token.type != tokenize.COMMENT:
            continue
        text, line = token.string.removeprefix("#").strip(), token.start[0]
        alone = not token.line[: token.start[1]].strip()
        if text.startswith("Differs: "):
            texts.append(text.removeprefix("Differs: "))
        elif line == unfinished and alone:
            texts[-1] += f" {text}"
        else:
            continue
        unfinished = line + 1 if alone and not text.endswith(".") else -1
    return [text if text.endswith(".") else f"{text}." for text in texts]


def _of_methods(cls: type) -> bool:
    return cls.__module__.startswith("trueup.methods.")


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
