"""Before and after adaptation: which classes are taken for which, and how features lie."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.report.figure_spec import Axis, Bars, Curve, Dots, Lines, Matrix, Panel, Plate
from trueup.report.groups import Group, Lookup, closer
from trueup.report.record_rows import Record, Run
from trueup.report.stream_figures import mean_and_deviation
from trueup.report.traces import Trace

CLASSES = 20  # rows of a matrix, or groups of bars, that can be read
COLOURED = 10  # classes that can be told apart by colour
FEWEST = 12  # images that t-SNE makes sense for
ANSWERS = ("image", "label", "prediction")
BOTH = ("alignment", "uniformity")
FEATURES = ("image", "label", "sample", "features")


def confusion(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """Matrices of the source and of the adapted model, on the target where adapting changed most."""
    return [plate for group in closer(records) for plate in _confusion(group, trace)]


def embedding(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """Features of the same images before and after adaptation, laid out by t-SNE."""
    return [plate for group in closer(records) for plate in _embedding(group, trace)]


def geometry(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """Alignment and uniformity of features: by class, along the stream, and against each other."""
    return [plate for group in closer(records) for plate in _geometry(group)]


def matrix(label: NDArray[Any], prediction: NDArray[Any], classes: int) -> NDArray[np.float64]:
    """Of the images of a class (row) the share in % taken for each class (column); NaN for a class without images."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, (label.astype(int), prediction.astype(int)), 1)
    total = counts.sum(axis=1, keepdims=True)
    return np.where(total > 0, 100 * counts / np.maximum(total, 1), np.nan)


def largest_change(group: Group, trace: Lookup, needs: Iterable[str]) -> tuple[str, Run, Trace, Trace] | None:
    """The target where the adapted row is farthest from the source, its first seed, and the traces of both."""
    line, base, metric = group.adapted, group.base, group.metric
    if line is None or base is None:
        return None
    changes: dict[str, float] = {}
    for target in group.targets:
        mine, theirs = line.values(target, metric), base.values(target, metric)
        both = [mine[run] - theirs[run] for run in mine if run in theirs]
        changes |= {target: abs(sum(both)) / len(both)} if both else {}
    for target in sorted(changes, key=lambda name: -changes[name]):
        for run, pair in sorted(group.pairs(line, target).items(), key=lambda item: str(item[0])):
            before, after = map(trace, pair)
            if before is None or after is None or any(n not in t for n in needs for t in (before, after)):
                continue
            if len(before["image"]) and np.array_equal(before["image"], after["image"]):
                return target, run, before, after
    return None


def _confusion(group: Group, trace: Lookup) -> list[Plate]:
    found = largest_change(group, trace, ANSWERS)
    if found is None or group.base is None or group.adapted is None:
        return []
    target, run, before, after = found
    classes = 1 + max(int(t[name].max()) for t in (before, after) for name in ("label", "prediction"))
    first, second = (matrix(t["label"], t["prediction"], classes) for t in (before, after))
    change = np.nan_to_num(np.abs(np.diag(second) - np.diag(first)), nan=-1.0)
    shown = np.sort(np.argsort(-change, kind="stable")[:CLASSES]) if classes > CLASSES else np.arange(classes)
    ticks = tuple(str(k) for k in shown)
    panels = tuple(
        Matrix(
            f"{word}: {label}, {np.mean(t['prediction'] == t['label']):.1%} right".replace("%", " %"),
            Axis("answer", ticks),
            Axis("true class", ticks),
            tuple(tuple(map(float, row)) for row in values[np.ix_(shown, shown)]),
        )
        for word, label, t, values in (
            ("before", group.base.label, before, first),
            ("after", group.adapted.label, after, second),
        )
    )
    few = f" The {CLASSES} classes of {classes} whose share of right answers changed most." if classes > CLASSES else ""
    caption = (
        f"Of the images of a class (row), the share in % that was taken for each class (column); right answers lie on "
        f"the diagonal.{few} {_where(target, run)} {group.setting}"
    )
    title = f"{group.title}: which classes are taken for which, on {target}"
    return [Plate(f"confusion-{group.name}", title, caption, panels)]


def _where(target: str, run: Run) -> str:
    return f"Target {target}, of those with traces the one where adapting changed most; seed {run[0]}."


def _embedding(group: Group, trace: Lookup) -> list[Plate]:
    found = largest_change(group, trace, FEATURES)
    if found is None or group.base is None or group.adapted is None:
        return []
    target, run, before, after = found
    _, mine, theirs = np.intersect1d(before["sample"], after["sample"], return_indices=True)
    labels = before["label"][before["sample"][mine]]
    names, counts = np.unique(labels, return_counts=True)
    common = np.sort(names[np.argsort(-counts, kind="stable")[:COLOURED]])
    kept = np.isin(labels, common)
    usable = all(np.isfinite(t["features"]).all() for t in (before, after))
    if kept.sum() < FEWEST or not usable:
        return []
    group_of = tuple(int(i) for i in np.searchsorted(common, labels[kept]))
    panels = []
    for title, features in (
        (f"before: {group.base.label}", before["features"][mine][kept]),
        (f"after: {group.adapted.label}", after["features"][theirs][kept]),
    ):
        at = lay_out(features.astype(np.float64))
        x, y = (tuple(map(float, column)) for column in at.T)
        panels.append(Dots(title, x, y, group_of, tuple(f"class {k}" for k in common)))
    few = f" The {COLOURED} classes of {len(names)} with most images." if len(names) > COLOURED else ""
    caption = (
        f"t-SNE of the features of the same {kept.sum()} images, coloured by true class.{few} It keeps near points "
        "near, and no more: the axes have no unit, sizes of clusters and distances between them mean nothing, and each "
        f"panel was laid out on its own, so places do not compare. {_where(target, run)} {group.setting}"
    )
    title = f"{group.title}: features before and after adaptation, on {target}"
    return [Plate(f"features-{group.name}", title, caption, tuple(panels))]


def lay_out(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Two numbers for each row of features, the same each time."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30.0, (len(features) - 1) / 3)
    if np.ptp(features, axis=0).max() == 0:
        return np.zeros((len(features), 2))  # all in one place: there is nothing to lay out
    # scikit-learn divides by the deviation of the first component, so a single column needs a second.
    wide = features if features.shape[1] > 1 else np.hstack([features, np.zeros_like(features)])
    with threadpool_limits(1):  # so few points are laid out faster by one thread than by many that wait for each other
        found = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(wide)
    return np.asarray(found, dtype=np.float64)


def _geometry(group: Group) -> list[Plate]:
    line = group.adapted
    pairs = [pair for target in group.targets for pair in (group.pairs(line, target).values() if line else ())]
    pairs = [p for p in pairs if all(r["results"].get(name) is not None for r in p for name in BOTH)]
    if not pairs or line is None or group.base is None:
        return []
    labels = group.base.label, line.label
    alike = in_common(group)
    by_class = [panel for name in BOTH for panel in _by_class(pairs, labels, name)]
    panels: list[Panel] = [*by_class, *_over_stream(alike), _plane(alike)]
    caption = (
        "Alignment: the mean squared distance between features of two images of one class; low means that a class is "
        "held tightly together. Uniformity: the logarithm of the mean of exp(−2 d²) over all pairs; low means that "
        "features spread over the whole sphere. Low is good for both, and only for both together: a network that gives "
        f"all images the same features has perfect alignment. {_verdict(pairs, line.label, group.base.label)} "
        "Of a class: pairs with at least one image of it. "
        f"Features have length 1; classes are the true ones. Means over targets and seeds; bars: ± one sample standard "
        f"deviation over them.{_left_out(group, alike)} "
        f"{group.setting} {group.seeds}"
    )
    title = f"{group.title}: alignment and uniformity of features"
    return [Plate(f"alignment-uniformity-{group.name}", title, caption, tuple(panels))]


def _verdict(pairs: Sequence[tuple[Record, Record]], after: str, before: str) -> str:
    """What the records say, in words."""
    said = []
    for name in BOTH:
        old, new = (float(np.mean([pair[i]["results"][name] for pair in pairs])) for i in (0, 1))
        first, then = (f"{value:z.3f}".replace("-", "−") for value in (old, new))
        change = "left" if first == then else "lowered" if new < old else "raised"
        how = f"at {first}" if change == "left" else f"from {first} to {then}"
        said.append(f"{change} {name} {how}")
    runs = f"{len(pairs)} run{'s' * (len(pairs) > 1)}"
    return f"Here {after} {' and '.join(said)} (mean of {runs} beside {before})."


def in_common(group: Group) -> dict[str, list[Record]]:
    """The records of each row on the targets and seeds that all rows have, by its label.

    A row that has fewer than half of what the source has is left out rather than cutting down the others.
    """
    runs = {
        line.label: {
            (target, run): record
            for target, by_run in line.runs.items()
            for run, record in by_run.items()
            if all(record["results"].get(name) is not None for name in BOTH)
        }
        for line in group.shown
    }
    full = len(runs[group.base.label]) if group.base else 0
    runs = {label: found for label, found in runs.items() if 2 * len(found) >= full and found}
    shared = set.intersection(*(set(found) for found in runs.values())) if runs else set()
    return {label: [record for key, record in found.items() if key in shared] for label, found in runs.items()}


def _left_out(group: Group, alike: Mapping[str, Sequence[Record]]) -> str:
    """Which rows are missing, and of how many runs the lines are, where that is not all."""
    count = len(next(iter(alike.values()), ()))
    most = max((sum(map(len, line.runs.values())) for line in group.shown), default=0)
    missing = [line.label for line in group.shown if line.label not in alike]
    said = f" Lines and points: the {count} of {most} runs that all these methods have." if count < most else ""
    return said + (f" Not shown, with too few runs: {', '.join(missing)}." if missing else "")


def _by_class(pairs: Sequence[tuple[Record, Record]], labels: Sequence[str], name: str) -> list[Bars]:
    """Bars of one of the two for each class, over runs where both sides have a number for it."""
    lists = [[pair[i]["results"].get(f"{name}_per_class") for pair in pairs] for i in (0, 1)]
    if any(not each for some in lists for each in some) or len({len(each) for some in lists for each in some}) != 1:
        return []
    old, new = (np.array([[np.nan if v is None else v for v in each] for each in some]) for some in lists)
    hole = np.isnan(old) | np.isnan(new)
    old[hole] = new[hole] = np.nan
    change = np.nan_to_num(np.abs(_down(new) - _down(old)), nan=-1.0)
    shown = np.sort(np.argsort(-change, kind="stable")[:CLASSES])
    shown = shown[change[shown] >= 0]
    curves = []
    for label, values in zip(labels, (old, new), strict=True):
        mean, spread = mean_and_deviation(list(values[:, shown]))
        curves.append(Curve(label, tuple(map(float, range(len(shown)))), mean, spread))
    few = f", the {CLASSES} of {old.shape[1]} classes that changed most" if old.shape[1] > len(shown) else ""
    x = Axis("true class", tuple(str(k) for k in shown))
    return [Bars(f"{name} by class{few}", x, Axis(f"{name} (low is good)"), tuple(curves))] if len(shown) else []


def _down(table: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array(mean_and_deviation(list(table))[0])


def _over_stream(alike: Mapping[str, Sequence[Record]]) -> list[Lines]:
    """Both over windows of the stream, for every row that has them."""
    panels = []
    for name in BOTH:
        curves = []
        for label, records in alike.items():
            runs = [record["results"].get("along") for record in records]
            along = [each for each in runs if each and each.get("images") and each.get(name)]
            if not along or len({len(each[name]) for each in along}) != 1 or len(along[0][name]) < 2:
                continue
            values = [np.array([np.nan if v is None else v for v in each[name]], dtype=np.float64) for each in along]
            ends = [100 * np.array(each["images"]) / each["images"][-1] for each in along]
            mean, _ = mean_and_deviation(values)  # targets lie far apart: their deviation would hide the lines
            curves.append(Curve(label, mean_and_deviation(ends)[0], mean))
        if curves:
            x, y = Axis("% of the stream seen"), Axis(f"{name} (low is good)")
            panels.append(Lines(f"{name} along the stream", x, y, tuple(curves)))
    return panels


def _plane(alike: Mapping[str, Sequence[Record]]) -> Lines:
    """A point of each row: uniformity to the right, alignment upwards."""
    curves = []
    for label, records in alike.items():
        points = np.array([[r["results"][name] for name in ("uniformity", "alignment")] for r in records])
        if len(points):
            x, y = points.mean(axis=0)
            curves.append(Curve(label, (float(x),), (float(y),)))
    title = "both: the lower left is good"
    return Lines(title, Axis("uniformity (low is good)"), Axis("alignment (low is good)"), tuple(curves))
