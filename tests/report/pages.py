"""Pages for tests, and a parser that reads them."""

import base64
import gzip
import json
import math
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import numpy as np
from studies import record

from trueup.report.figure_spec import (
    Axis,
    BarPanel,
    Curve,
    FigureSpec,
    ImagePanel,
    LinePanel,
    MatrixPanel,
    ScatterPanel,
)

VOID = {"meta", "link", "br", "input", "image", "use", "path", "rect", "line", "circle"}
NASTY = '</script ><script>alert(1)</script><img src=x onerror="alert(1)">&\'"\u2028\ud800\0<!--'


class Node:
    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        self.name, self.attributes, self.children, self.own = name, attributes, list[Node](), ""

    def all(self, name: str, **wanted: str) -> "Iterator[Node]":
        for child in self.children:
            found = child.name == name and all(child.attributes.get(k.rstrip("_")) == v for k, v in wanted.items())
            if found:
                yield child
            yield from child.all(name, **wanted)

    @property
    def text(self) -> str:
        """Text in its order does not matter to these tests: own text and that of children."""
        return self.own + "".join(child.text for child in self.children)


class Tree(HTMLParser):
    """Fails on a tag that is closed by another's end, so escaping that breaks the shape is seen."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.root = Node("", {})
        self.path = [self.root]
        self.feed(document)
        self.close()
        assert self.path == [self.root], f"never closed: {[node.name for node in self.path]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        assert len(attrs) == len(node.attributes), f"an attribute twice: {attrs}"
        self.path[-1].children.append(node)
        if tag not in VOID:
            self.path.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.path[-1].children.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop().name == tag

    def handle_data(self, data: str) -> None:
        self.path[-1].own += data


def read(document: str) -> Node:
    return Tree(document).root


def every(root: Node) -> Iterator[Node]:
    for child in root.children:
        yield child
        yield from every(child)


def data(root: Node, name: str) -> Any:
    (script,) = root.all("script", id=name)
    if script.attributes["type"] == "text/plain":
        return json.loads(gzip.decompress(base64.b64decode(script.own)))
    return json.loads(script.own)


def figures(word: str = "tsd") -> list[FigureSpec]:
    """One of each kind."""
    x, y = Axis("images seen"), Axis("accuracy in %")
    curves = (
        Curve("source", (100, 200, 300), (50, math.nan, 52), (1, 1, 1)),
        Curve(word, (100, 200, 300), (55, 60, 65)),
    )
    targets = Axis("target", (word, "b"))
    bars = (Curve("source", (0, 1), (50, 40), (2, 3)), Curve(word, (0, 1), (60, 70)))
    mask = np.zeros((8, 8), np.uint8)
    mask[2:5, 3:6] = 1
    image = np.full((8, 8, 3), 128, np.uint8)
    pictures = (ImagePanel("truth", image, {word: mask}, "note"), ImagePanel("answer", image, {word: 1 - mask}, word))
    matrix = MatrixPanel(
        "before", Axis("answer", (word, "1")), Axis("true class", ("0", "1")), ((90.0, 10.0), (35.0, 65.0))
    )
    return [
        FigureSpec(
            "along",
            f"Along {word}",
            f"Caption {word}",
            (LinePanel("one", x, y, curves), LinePanel("two", x, y, curves)),
        ),
        FigureSpec("targets", "By target", "Bars.", (BarPanel("", targets, y, bars),), 1),
        FigureSpec("confusion", "Confusion", "Rows.", (matrix,)),
        FigureSpec(
            "features",
            "Features",
            "Dots.",
            (ScatterPanel("", (0.0, 1.0, 2.0), (0.0, 2.0, 1.0), (0, 1, 1), (word, "b")),),
        ),
        FigureSpec("masks", "Masks", "Outlines.", pictures, 4),
    ]


def cells(root: Node) -> list[list[str]]:
    """A table as one reads it, without what only screen readers say."""
    for span in list(root.all("span", class_="unseen")):
        span.own = ""
    return [[_line(cell) for cell in row.children] for row in root.all("tr")]


def _line(cell: Node) -> str:
    return " ".join(cell.text.replace("−", "-").split())


def thousand(classes: int = 10, cases: int = 0) -> list[dict[str, Any]]:
    """Ten methods, five targets, twenty seeds, with all that a record holds."""
    random = np.random.default_rng(0)
    environment = {f"library{i}": f"{i}.0.1+cu132" for i in range(16)}
    runs = []
    for i in range(1000):
        results = {name: float(random.random()) for name in ("accuracy", "macro", "ece", "nll")}
        results |= {"per_class": random.random(classes).tolist(), "images": 2000}
        results |= {"alignment_per_class": random.random(classes).tolist()}
        results |= {"along": {name: random.random(8).tolist() for name in ("images", "alignment", "uniformity")}}
        dice = random.random((cases, 2, 3)).tolist()
        names = ("dice", "hd95", "assd")
        parts = [
            {part: dict(zip(names, v, strict=True)) for part, v in zip(("disc", "cup"), c, strict=True)} for c in dice
        ]
        results |= {"per_case": {f"case-{n:03}": part for n, part in enumerate(parts)}} if cases else {}
        cost = {name: float(random.random()) for name in ("seconds", "images_per_second", "peak_memory_mb")}
        method, target, seed = ("source", *(f"method{k}" for k in range(1, 10)))[i % 10], f"t{i // 10 % 5}", i // 50
        run = record(method, target, seed, 0.0, results=results, cost=cost, environment=environment, id=f"{i:016x}")
        runs.append(run | {"finished": f"2026-01-01T00:{i // 60:02}:{i % 60:02}Z"})
    return runs


def hostile() -> list[dict[str, Any]]:
    knobs: dict[str, Any] = {"dataset": NASTY, "network": NASTY, "stream": NASTY, "hyper": {NASTY: NASTY}}
    good = record(f"tsd{NASTY}", NASTY, 0, 0.5, **knobs, environment={NASTY: NASTY})
    base = record("source", NASTY, 0, 0.25, **knobs, environment={NASTY: "else", "x": math.nan})
    bad = record("bn", NASTY, 0, None, **knobs) | {"error": NASTY, "at": [NASTY]}
    return [base, good, bad]


def sweeps() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tsd changed by 1, 3 (a) and 2 (b) points, source not at all; one run is on each side only, one failed."""
    mine = {("source", "a", 0): 0.5, ("tsd", "a", 0): 0.61, ("tsd", "a", 1): 0.63, ("tsd", "b", 0): 0.72}
    other = {("source", "a", 0): 0.5, ("tsd", "a", 0): 0.60, ("tsd", "a", 1): 0.60, ("tsd", "b", 0): 0.70}
    new = mine | {("bn", "a", 0): None, ("pl", "a", 0): 0.6}
    old = other | {("bn", "a", 0): 0.4, ("tent", "a", 4): 0.6}
    first, second = ([record(*run, value, code={"x": n}) for run, value in s.items()] for n, s in enumerate((new, old)))
    return first, second
