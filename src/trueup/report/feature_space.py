"""Figures before and after adaptation: confusion matrices, the geometry of features, and masks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.report.figure_spec import Axis, BarPanel, Curve, ImagePanel, LinePanel, MatrixPanel, ScatterPanel
from trueup.report.groups import Figures, Group, Trace, TraceLookup, detail_groups
from trueup.report.runs import Record, RunKey
from trueup.report.stream_figures import mean_and_deviation

CLASSES = 20  # rows of a matrix, or groups of bars, at most
COLOURED = 10  # classes with colours of their own
FEWEST = 12  # images for t-SNE, at least
ANSWERS = ("image", "label", "prediction")
BOTH = ("alignment", "uniformity")
FEATURES = ("image", "label", "sample", "features")
MASKS = ("examples", "truth", "answer", "structures", "example_names")


def confusion_matrix(label: NDArray[Any], prediction: NDArray[Any], classes: int) -> NDArray[np.float64]:
    """Return the share in % of each class (row) predicted as each class (column); NaN for a class without images."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, (label.astype(int), prediction.astype(int)), 1)
    total = counts.sum(axis=1, keepdims=True)
    return np.where(total > 0, 100 * counts / np.maximum(total, 1), np.nan)


def largest_change(group: Group, trace: TraceLookup, needs: Collection[str]) -> tuple[str, RunKey, Trace, Trace] | None:
    """Return the target with the largest change, and of its first seed the traces of source and adapted model."""
    changes: dict[str, float] = {}
    variants = [variant for variant in (group.adapted, group.base) if variant]
    for target in group.targets if len(variants) == 2 else ():
        mine, theirs = (variant.values(target, group.metric) for variant in variants)
        both = [mine[run] - theirs[run] for run in mine if run in theirs]
        changes |= {target: abs(sum(both)) / len(both)} if both else {}
    for target in sorted(changes, key=lambda name: -changes[name]):
        if found := group.traced_pair(target, trace, needs, "image"):
            return target, *found
    return None


def confusion(records: Sequence[Record], trace: TraceLookup) -> Figures:
    """Draw confusion matrices of source and adapted model, on the target with the largest change."""
    for group in detail_groups(records):
        if not (found := largest_change(group, trace, ANSWERS)):
            continue
        target, run, *traces = found
        classes = 1 + max(int(t[name].max()) for t in traces for name in ("label", "prediction"))
        first, second = matrices = [confusion_matrix(t["label"], t["prediction"], classes) for t in traces]
        change = np.nan_to_num(np.abs(np.diag(second) - np.diag(first)), nan=-1.0)
        shown = np.sort(np.argsort(-change, kind="stable")[:CLASSES])
        ticks = tuple(str(k) for k in shown)
        panels = []
        for word, t, values in zip(group.before_after, traces, matrices, strict=True):
            title = f"{word}, {np.mean(t['prediction'] == t['label']):.1%} right".replace("%", " %")
            rows = tuple(tuple(map(float, row)) for row in values[np.ix_(shown, shown)])
            panels.append(MatrixPanel(title, Axis("answer", ticks), Axis("true class", ticks), rows))
        many = f" The {CLASSES} classes of {classes} whose share of right answers changed most."
        caption = (
            "Of the images of a class (row), the share in % that was taken for each class (column); right answers lie "
            f"on the diagonal.{many if classes > CLASSES else ''} {_where(target, run)}"
        )
        yield group.figure("confusion", f"confusion matrices, on {target}", [caption, group.setting], panels)


def _where(target: str, run: RunKey) -> str:
    return f"Target {target}, of those with traces the one where adapting changed most; seed {run[0]}."


def embedding(records: Sequence[Record], trace: TraceLookup) -> Figures:
    """Draw t-SNE of the features of the same images before and after adaptation."""
    for group in detail_groups(records):
        if not (found := largest_change(group, trace, FEATURES)):
            continue
        target, run, before, after = found
        _, mine, theirs = np.intersect1d(before["sample"], after["sample"], return_indices=True)
        labels = before["label"][before["sample"][mine]]
        names, counts = np.unique(labels, return_counts=True)
        common = np.sort(names[np.argsort(-counts, kind="stable")[:COLOURED]])
        kept = np.isin(labels, common)
        usable = all(np.isfinite(t["features"]).all() for t in (before, after))
        if kept.sum() < FEWEST or not usable:
            continue
        group_of = tuple(int(i) for i in np.searchsorted(common, labels[kept]))
        panels = []
        both = before["features"][mine], after["features"][theirs]
        for title, features in zip(group.before_after, both, strict=True):
            x, y = (tuple(map(float, column)) for column in lay_out(features[kept].astype(np.float64)).T)
            panels.append(ScatterPanel(title, x, y, group_of, tuple(f"class {k}" for k in common)))
        few = f" The {COLOURED} classes of {len(names)} with most images." if len(names) > COLOURED else ""
        caption = (
            f"t-SNE of the features of the same {kept.sum()} images, coloured by true class.{few} It keeps near points "
            "near, and no more: the axes have no unit, sizes of clusters and distances between them mean nothing, and "
            f"each panel was laid out on its own, so places do not compare. {_where(target, run)}"
        )
        title = f"features before and after adaptation, on {target}"
        yield group.figure("features", title, [caption, group.setting], panels)


def lay_out(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return two coordinates for each row of features, deterministically."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30.0, (len(features) - 1) / 3)
    if np.ptp(features, axis=0).max() == 0:
        return np.zeros((len(features), 2))  # all points are equal
    # scikit-learn divides by the deviation of the first component, so a single column needs a second.
    wide = features if features.shape[1] > 1 else np.hstack([features, np.zeros_like(features)])
    with threadpool_limits(1):  # one thread is faster for so few points
        found = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(wide)
    return np.asarray(found, dtype=np.float64)


def geometry(records: Sequence[Record]) -> Figures:
    """Draw alignment and uniformity of features: by class, along the stream, and against each other."""
    for group in detail_groups(records):
        pairs = [pair for t in group.targets if group.adapted for pair in group.pairs(group.adapted, t).values()]
        pairs = [p for p in pairs if all(r["results"].get(name) is not None for r in p for name in BOTH)]
        if not pairs or group.adapted is None or group.base is None:
            continue
        labels = group.base.label, group.adapted.label
        alike = in_common(group)
        by_class = [panel for name in BOTH for panel in _by_class(pairs, labels, name)]
        panels = [*by_class, *_over_stream(alike), _plane(alike)]
        text = (
            "Alignment: the mean squared distance between features of two images of one class; low means that a class "
            "is held tightly together. Uniformity: the logarithm of the mean of exp(−2 d²) over all pairs; low means "
            "that features spread over the whole sphere. Low is good for both, and only for both together: a network "
            f"that gives all images the same features has perfect alignment. {_verdict(pairs, *labels)} "
            "Of a class: pairs with at least one image of it. Features have length 1; classes are the true ones. Means "
            "over targets and seeds; bars: ± one sample standard deviation over them."
            f"{_left_out(group, alike)}"
        )
        caption = [text, group.setting, group.seeds]
        yield group.figure("alignment-uniformity", "alignment and uniformity of features", caption, panels)


def _verdict(pairs: Sequence[tuple[Record, Record]], before: str, after: str) -> str:
    """Say how adaptation changed alignment and uniformity."""
    words = []
    for name in BOTH:
        old, new = (float(np.mean([pair[i]["results"][name] for pair in pairs])) for i in (0, 1))
        first, then = (f"{value:z.3f}".replace("-", "−") for value in (old, new))
        change = "left" if first == then else "lowered" if new < old else "raised"
        how = f"at {first}" if change == "left" else f"from {first} to {then}"
        words.append(f"{change} {name} {how}")
    runs = f"{len(pairs)} run{'s' * (len(pairs) > 1)}"
    return f"Here {after} {' and '.join(words)} (mean of {runs} beside {before})."


def in_common(group: Group) -> dict[str, list[Record]]:
    """Return the records of each variant, by label, on the targets and seeds that all variants have."""
    runs = {
        variant.label: {
            (target, run): record
            for target, by_run in variant.runs.items()
            for run, record in by_run.items()
            if all(record["results"].get(name) is not None for name in BOTH)
        }
        for variant in group.shown
    }
    full = len(runs[group.base.label]) if group.base else 0
    # Without variants that have fewer than half of the source's runs, which would reduce the others.
    runs = {label: found for label, found in runs.items() if 2 * len(found) >= full and found}
    shared = set.intersection(*(set(found) for found in runs.values())) if runs else set()
    return {label: [record for key, record in found.items() if key in shared] for label, found in runs.items()}


def _left_out(group: Group, alike: Mapping[str, Sequence[Record]]) -> str:
    """Say which variants are missing, and how many runs the lines cover, if not all."""
    count = len(next(iter(alike.values()), ()))
    most = max((sum(map(len, variant.runs.values())) for variant in group.shown), default=0)
    missing = [variant.label for variant in group.shown if variant.label not in alike]
    text = f" Lines and points: the {count} of {most} runs that all these methods have." if count < most else ""
    return text + (f" Not shown, with too few runs: {', '.join(missing)}." if missing else "")


def _by_class(pairs: Sequence[tuple[Record, Record]], labels: Sequence[str], name: str) -> list[BarPanel]:
    """Return bars by class, over runs where both sides have a number for the class."""
    lists = [[pair[i]["results"].get(f"{name}_per_class") for pair in pairs] for i in (0, 1)]
    if any(not each for some in lists for each in some) or len({len(each) for some in lists for each in some}) != 1:
        return []
    old, new = (np.array([[np.nan if v is None else v for v in each] for each in some]) for some in lists)
    hole = np.isnan(old) | np.isnan(new)
    old[hole] = new[hole] = np.nan
    before, after = (np.array(mean_and_deviation(list(values))[0]) for values in (old, new))
    change = np.nan_to_num(np.abs(after - before), nan=-1.0)
    shown = np.sort(np.argsort(-change, kind="stable")[:CLASSES])
    shown = shown[change[shown] >= 0]
    curves = []
    for label, values in zip(labels, (old, new), strict=True):
        mean, spread = mean_and_deviation(list(values[:, shown]))
        curves.append(Curve(label, tuple(map(float, range(len(shown)))), mean, spread))
    few = f", the {CLASSES} of {old.shape[1]} classes that changed most" if old.shape[1] > len(shown) else ""
    x = Axis("true class", tuple(str(k) for k in shown))
    return [BarPanel(f"{name} by class{few}", x, Axis(f"{name} (low is good)"), tuple(curves))] if len(shown) else []


def _over_stream(alike: Mapping[str, Sequence[Record]]) -> list[LinePanel]:
    """Return both over windows of the stream, for every variant that has them."""
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
            mean, _ = mean_and_deviation(values)  # the deviation over targets is large, and would hide the lines
            curves.append(Curve(label, mean_and_deviation(ends)[0], mean))
        if curves:
            x, y = Axis("% of the stream seen"), Axis(f"{name} (low is good)")
            panels.append(LinePanel(f"{name} along the stream", x, y, tuple(curves)))
    return panels


def _plane(alike: Mapping[str, Sequence[Record]]) -> LinePanel:
    """Return a point for each variant: uniformity on x, alignment on y."""
    curves = []
    for label, records in alike.items():
        points = np.array([[r["results"][name] for name in ("uniformity", "alignment")] for r in records])
        if len(points):
            x, y = points.mean(axis=0)
            curves.append(Curve(label, (float(x),), (float(y),)))
    title = "both: the lower left is good"
    return LinePanel(title, Axis("uniformity (low is good)"), Axis("alignment (low is good)"), tuple(curves))


def mask_examples(records: Sequence[Record], trace: TraceLookup) -> Figures:
    """Draw, for each target, the last images of the stream of its first seed, before and after adaptation."""
    groups = [group for group in detail_groups(records) if group.metric.name == "dice"]
    for group, target in [(each, target) for each in groups for target in each.targets]:
        found = group.traced_pair(target, trace, MASKS, "examples")
        if found is None or group.base is None or group.adapted is None:
            continue
        run, before, after = found
        answers = {group.base.label: before["answer"], group.adapted.label: after["answer"]}
        panels = [p for i in range(len(before["examples"])) for p in _example(before, answers, i)]
        caption = (
            f"The last images of the stream, target {target}, seed {run[0]}: image, truth, and the outlines that "
            f"{' and '.join(answers)} drew. Dice: of this image alone, mean over structures."
        )
        title = f"masks before and after adaptation, on {target}"
        figure = group.figure("masks", title, [caption, group.setting], panels, 2 + len(answers))
        yield replace(figure, name=f"{figure.name}-{group.targets.index(target) + 1}")


def example_dice(truth: NDArray[Any], answer: NDArray[Any]) -> float:
    """Return the mean over structures (S, H, W) in the truth or in the answer; NaN if there are none."""
    a, b = truth.astype(bool), answer.astype(bool)
    both, total = (a & b).sum(axis=(1, 2)), a.sum(axis=(1, 2)) + b.sum(axis=(1, 2))
    return float(np.mean(2 * both[total > 0] / total[total > 0])) if total.any() else float("nan")


def _example(trace: Trace, answers: Mapping[str, NDArray[Any]], i: int) -> list[ImagePanel]:
    """Return image, truth and answers side by side."""
    image, names = trace["examples"][i], [str(name) for name in trace["structures"]]
    truth = trace["truth"][i]
    row = [ImagePanel("image", image, {}, str(trace["example_names"][i]))]
    row.append(ImagePanel("truth", image, dict(zip(names, truth, strict=True))))
    for label, masks in answers.items():
        value = example_dice(truth, masks[i])
        note = "Dice undefined" if np.isnan(value) else f"Dice {100 * value:.1f} %"
        row.append(ImagePanel(label, image, dict(zip(names, masks[i], strict=True)), note))
    return row
