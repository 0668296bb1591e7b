"""Figures as pure functions of records and traces, against numbers worked out by hand."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from studies import record
from traced import Lookup, study

from trueup.report.feature_space import (
    confusion,
    confusion_matrix,
    embedding,
    example_dice,
    geometry,
    lay_out,
    mask_examples,
)
from trueup.report.figure_spec import BarPanel, Curve, FigureSpec, ImagePanel, LinePanel, MatrixPanel, ScatterPanel
from trueup.report.groups import detail_groups, group_runs
from trueup.report.record_figures import batch_sizes, make_figures, sensitivity, target_bars
from trueup.report.runs import Record
from trueup.report.stream_figures import (
    ACCURACY,
    AGREEMENT,
    DICE,
    ENTROPY,
    along_stream,
    moving,
    windows,
)

Runs = list[tuple[Record, dict[str, Any]]]


def run(method: str, target: str, seed: int, labels: list[int], answers: list[int], **more: Any) -> Any:
    """A record and its trace: the answers to images with these labels."""
    right = float(np.mean(np.array(labels) == np.array(answers)))
    trace = {
        "image": np.arange(len(labels)),
        "domain": np.zeros(len(labels), dtype=int),
        "label": np.array(labels),
        "prediction": np.array(answers),
        "entropy": np.linspace(0, 1, len(labels)),
    }
    made = record(method, target, seed, right, **more)
    return {**made, "trace": "traces/x.npz"}, trace


def lookup(runs: Runs) -> tuple[list[Record], Lookup]:
    found = {made["id"]: trace for made, trace in runs}
    return [made for made, _ in runs], lambda made: found.get(made["id"])


def only(found: Iterable[FigureSpec]) -> FigureSpec:
    (figure,) = found
    return figure


def curves(figure: FigureSpec, panel: int = 0) -> dict[str, Curve]:
    shown = figure.panels[panel]
    assert isinstance(shown, LinePanel | BarPanel)
    return {curve.label: curve for curve in shown.curves}


# Along the stream


def test_windows_are_a_tenth_and_end_with_the_stream() -> None:
    starts, ends = windows(20, 10)
    assert ends.tolist() == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert (ends - starts).tolist() == [2] * 10
    starts, ends = windows(40, 40)
    assert (starts[0], ends[0], starts[-1], ends[-1]) == (0, 4, 36, 40)


def test_moving_mean_against_one_window_at_a_time() -> None:
    values = np.random.default_rng(0).normal(size=87)
    values[10:30] = np.nan
    found = moving(values, 40)
    starts, ends = windows(87, 40)
    for mean, start, end in zip(found, starts, ends, strict=True):
        there = [v for v in values[start:end] if not math.isnan(v)]
        assert mean == pytest.approx(sum(there) / len(there)) if there else math.isnan(mean)
    assert np.isnan(found).any()


def ten(*answers: int) -> list[int]:
    return list(answers)


def test_accuracy_along_is_the_mean_over_seeds_with_its_deviation() -> None:
    zeros = [0] * 10
    runs = [run("source", "a", 0, zeros, ten(0, 0, 0, 0, 0, 1, 1, 1, 1, 1)), run("source", "a", 1, zeros, zeros)]
    curve = curves(only(along_stream(*lookup(runs), ACCURACY)))["source"]
    assert curve.x == tuple(range(1, 11))
    assert curve.y == (100,) * 5 + (50,) * 5
    assert curve.spread == pytest.approx((0,) * 5 + (math.sqrt(5000),) * 5)


def test_one_seed_has_no_spread() -> None:
    assert curves(only(along_stream(*lookup([run("tent", "a", 0, [0, 1], [0, 0])]), ACCURACY)))["tent"].spread == ()


def test_agreement_is_with_the_source_of_the_same_seed() -> None:
    labels = [0] * 10
    runs = [
        run("source", "a", 0, labels, [1] * 10),
        run("tent", "a", 0, labels, ten(1, 1, 1, 1, 1, 0, 0, 0, 0, 0)),
        run("source", "a", 1, labels, [2] * 10),
        run("tent", "a", 1, labels, [2] * 10),
    ]
    found = curves(only(along_stream(*lookup(runs), AGREEMENT)))
    assert list(found) == ["tent"]
    assert found["tent"].y == (100,) * 5 + (50,) * 5


def test_agreement_needs_the_same_images() -> None:
    runs = [run("source", "a", 0, [0, 0], [0, 0]), run("tent", "a", 0, [0, 0], [0, 0])]
    runs[1][1]["image"] = np.array([1, 0])
    assert list(along_stream(*lookup(runs), AGREEMENT)) == []


def test_entropy_along() -> None:
    curve = curves(only(along_stream(*lookup([run("tent", "a", 0, [0] * 11, [0] * 11)]), ENTROPY)))["tent"]
    assert curve.y[-1] == pytest.approx(1.0)


def test_each_target_has_a_panel_and_many_have_their_mean() -> None:
    def share(right: int) -> list[int]:
        return [0] * right + [1] * (10 - right)

    few = [run("source", name, 0, [0] * 10, share(5)) for name in "ab"]
    assert [panel.title for panel in only(along_stream(*lookup(few), ACCURACY)).panels] == ["a", "b"]
    many = [run("source", name, s, [0] * 10, share(i + 3 * s)) for i, name in enumerate("abcdefg") for s in (0, 1)]
    many += [run("tent", "a", 0, [0] * 10, share(10))]  # has not all targets: no mean
    figure = only(along_stream(*lookup(many), ACCURACY))
    found = curves(figure)
    assert (len(figure.panels), list(found)) == (1, ["source"])
    # Of seven targets, 0 to 6 images are right first; so the second image is right in five of them, with seed 1 in all.
    assert found["source"].x[1] == 20
    assert found["source"].y[1] == pytest.approx((500 / 7 + 100) / 2)


def test_dice_along_leaves_out_what_is_undefined() -> None:
    made, trace = run("tsd", "a", 0, [0] * 4, [0] * 4, results={"dice": 0.5})
    values = {"image": trace["image"], "domain": trace["domain"], "dice": np.array([0.5, np.nan, 1, 1], np.float32)}
    curve = curves(only(along_stream(*lookup([(made, values)]), DICE)))["tsd"]
    assert curve.y == pytest.approx((50, math.nan, 100, 100), nan_ok=True)
    assert list(along_stream(*lookup([(made, values)]), ACCURACY)) == []


def test_streams_over_domains_say_where_they_turn() -> None:
    made, trace = run("tsd", "a+b", 0, [0] * 4, [0] * 4)
    trace["domain"] = np.array([0, 0, 0, 1])
    assert "a+b enters b after 3 images." in only(along_stream(*lookup([(made, trace)]), ACCURACY)).caption


# Groups


@pytest.mark.parametrize(
    "change",
    [{"dataset": "pacs"}, {"network": "vit"}, {"stream": "sorted"}, {"disturb": "nan"}, {"repeat": 2}, {"limit": 9}],
)
def test_nothing_is_averaged_across_settings(change: dict[str, Any]) -> None:
    runs = [run("source", "a", 0, [0] * 10, [0] * 10), run("source", "a", 1, [0] * 10, [1] * 10, **change)]
    for found in map(list, (along_stream(*lookup(runs), ACCURACY), target_bars(lookup(runs)[0]))):
        assert [curves(figure)["source"].y[0] for figure in found] == [100, 0]
        assert len({figure.name for figure in found}) == len({figure.title for figure in found}) == 2


def test_other_batch_sizes_do_not_mix_in() -> None:
    runs = [run("source", "a", s, [0] * 10, [s] * 10, batch=size) for s, size in ((0, 8), (1, 64))]
    assert [curves(figure)["source"].y for figure in target_bars(lookup(runs)[0])] == [(100,), (0,)]
    (group,) = detail_groups(lookup(runs)[0])
    assert group.title == "digits, batch 64"
    assert curves(only(along_stream(*lookup(runs), ACCURACY)))["source"].y == (0,) * 10


def test_groups_are_called_by_what_sets_them_apart() -> None:
    runs = [record("tent", "a", 0, 0.5, **change) for change in ({}, {"disturb": "nan"}, {"network": "vit"})]
    found = group_runs([*runs, record("tent", "a", 0, None, dataset="gone")])
    assert [group.title for group in found] == ["digits, digits-net", "digits, digits-net, disturb nan", "digits, vit"]
    assert [group.name for group in found][1] == "digits-digits-net-disturb-nan"


def test_of_two_records_of_a_run_the_last_counts() -> None:
    runs = [record("tent", "a", 0, value, id="x") for value in (0.5, 0.7)]
    assert curves(only(target_bars(runs)))["tent"].y == (70,)


def test_adapted_is_tsd_or_else_the_best() -> None:
    values = {"source": 0.9, "tent": 0.6, "bn": 0.7, "tsd": 0.5}
    runs = [record(method, "a", 0, value) for method, value in values.items()]
    for some, label in ((runs, "tsd"), (runs[:3], "bn")):
        adapted = group_runs(some)[0].adapted
        assert adapted is not None
        assert adapted.label == label
    assert group_runs(runs[:1])[0].adapted is None


# BarPanel


def test_bars_by_target_and_on_average() -> None:
    values = {("a", 0): 0.5, ("a", 1): 0.7, ("b", 0): 0.1, ("b", 1): 0.3}
    figure = only(target_bars([record("tent", t, s, v) for (t, s), v in values.items()]))
    panel = figure.panels[0]
    assert isinstance(panel, BarPanel)
    assert panel.x.ticks == ("a", "b", "average")
    assert panel.curves[0].y == pytest.approx((60, 20, 40))
    assert panel.curves[0].spread == pytest.approx((math.sqrt(200), math.sqrt(200), math.sqrt(200)))


def test_joined_targets_are_shown_by_domain() -> None:
    parts = [{"a": 0.2, "b": 0.6}, {"a": 0.4, "b": 0.8}]
    runs = [record("tent", "a+b", s, 0, results={"accuracy": 0.5, "per_domain": p}) for s, p in enumerate(parts)]
    figure = only(target_bars(runs))
    assert curves(figure, 1)["tent"].y == pytest.approx((30, 70))


# Before and after


def test_confusion_by_hand() -> None:
    labels, answers = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 1, 1, 1, 1, 2])
    assert confusion_matrix(labels, answers, 3) == pytest.approx(
        np.array([[25, 75, 0], [0, 50, 50], [np.nan] * 3]), nan_ok=True
    )


def test_confusion_is_of_the_target_that_changed_most() -> None:
    labels = [0, 0, 1, 1]
    runs = [run("source", "a", 0, labels, [0, 0, 1, 0]), run("tsd", "a", 0, labels, labels)]
    runs += [run("source", "b", 0, labels, [1, 1, 1, 0]), run("tsd", "b", 0, labels, [0, 1, 1, 1])]
    figure = only(confusion(*lookup(runs)))
    before, after = figure.panels
    assert isinstance(before, MatrixPanel)
    assert isinstance(after, MatrixPanel)
    assert "Target b" in figure.caption
    assert before.values == ((0, 100), (50, 50))
    assert after.values == ((50, 50), (0, 100))
    assert (before.title, after.title) == ("before: source, 25.0 % right", "after: tsd, 75.0 % right")


def test_a_large_confusion_shows_what_changed_most() -> None:
    labels = list(range(30))
    after = [0] * 10 + labels[10:]
    figure = only(confusion(*lookup([run("source", "a", 0, labels, [0] * 30), run("tsd", "a", 0, labels, after)])))
    panel = figure.panels[0]
    assert isinstance(panel, MatrixPanel)
    assert panel.y.ticks == tuple(str(k) for k in range(10, 30))
    assert "20 classes of 30" in figure.caption


def test_features_are_of_the_same_images_and_keep_groups_apart() -> None:
    runs = [run(m, "a", 0, [0, 0, 0, 1] * 10, [0] * 40) for m in ("source", "tsd")]
    for (_, trace), step in zip(runs, (1, -1), strict=True):
        trace["sample"] = np.arange(40)[::step]
        apart = np.random.default_rng(0).normal(size=(40, 4)) + 50 * trace["label"][trace["sample"]][:, None]
        trace["features"] = apart.astype(np.float16)
    before, after = only(embedding(*lookup(runs))).panels
    for panel in (before, after):
        assert isinstance(panel, ScatterPanel)
        assert panel.group == (0, 0, 0, 1) * 10
        at, group = np.array([panel.x, panel.y]).T, np.array(panel.group)
        near = ((at[:, None] - at[None]) ** 2).sum(-1) + np.diag([np.inf] * 40)
        assert (group[near.argmin(1)] == group).all()


def test_layout_is_the_same_each_time_and_copes_with_one_place() -> None:
    features = np.random.default_rng(1).normal(size=(20, 3))
    assert np.array_equal(lay_out(features), lay_out(features))
    assert not lay_out(np.ones((20, 3))).any()
    assert lay_out(features[:, :1]).shape == (20, 2)


def shaped(method: str, seed: int, alignment: float, uniformity: float, per_class: list[float | None]) -> Record:
    along = {"images": [5, 10], "alignment": [alignment, None], "uniformity": [uniformity, uniformity - 1]}
    shape = {"alignment": alignment, "uniformity": uniformity, "alignment_per_class": per_class, "along": along}
    return record(method, "a", seed, 0.0, results={"accuracy": 0.5, **shape})


def test_alignment_and_uniformity() -> None:
    runs = [shaped("source", 0, 1.0, -1.0, [1.0, None]), shaped("source", 1, 0.6, -2.0, [0.6, 0.2])]
    runs += [shaped("tsd", 0, 0.5, -1.0, [0.5, 0.4]), shaped("tsd", 1, 0.3, -1.4, [0.3, 0.3])]
    figure = only(geometry(runs))
    bars, first, second, plane = (curves(figure, i) for i in range(4))
    assert bars["source"].y == pytest.approx((0.8, 0.2))
    assert bars["tsd"].y == pytest.approx((0.4, 0.3))  # class 1 of seed 0 has no counterpart
    assert first["tsd"].x == (50, 100)
    assert first["tsd"].y == pytest.approx((0.4, math.nan), nan_ok=True)
    assert second["tsd"].y == pytest.approx((-1.2, -2.2))
    assert (plane["source"].x, plane["source"].y) == (pytest.approx((-1.5,)), pytest.approx((0.8,)))
    said = "Here tsd lowered alignment from 0.800 to 0.400 and raised uniformity from −1.500 to −1.200 (mean of 2 runs"
    assert said in figure.caption


# Against settings


def test_batch_sizes() -> None:
    runs = []
    for size, value, speed in ((1, 0.2, 10.0), (8, 0.5, 100.0)):
        cost = {"images_per_second": speed, "peak_memory_mb": 50.0 * size}
        runs += [record("tent", t, s, value + s / 10, batch=size, cost=cost) for t in "ab" for s in (0, 1)]
        runs += [record("tent", "only here", 0, 0.9, batch=1, cost=cost)]
    figure = only(batch_sizes(runs))
    accuracy, time, memory = (curves(figure, i)["tent"] for i in range(3))
    assert (accuracy.x, accuracy.y) == ((1, 8), pytest.approx((25, 55)))
    assert accuracy.spread == pytest.approx((math.sqrt(50), math.sqrt(50)))
    assert (time.y, memory.y) == ((100, 10), (50, 400))
    assert "batches of" not in figure.caption
    assert list(batch_sizes(runs[:4])) == []


def test_sensitivity_varies_one_value_and_knows_the_paper() -> None:
    values = {None: 0.5, 3: 0.6, 1: 0.3}
    runs = [record("tsd", "a", 0, v, hyper={"per_class": m, "lr": 0.1}) for m, v in values.items()]
    runs += [record("tsd", "a", 0, 0.9, hyper={"per_class": 1, "lr": 0.2}), record("source", "a", 0, 0.4)]
    figure = only(sensitivity(runs))
    (panel,) = figure.panels
    assert isinstance(panel, LinePanel)
    assert (panel.title, panel.x.ticks) == ("M, entries kept per class", ("1", "3", "all"))
    found = curves(figure)
    assert found["tsd"].y == pytest.approx((30, 60, 50))
    assert found["source"].y == pytest.approx((40, 40, 40))
    assert list(sensitivity(runs[1:])) == []


def test_rows_that_only_try_values_have_no_bars() -> None:
    records, trace = study(values={"neighbors": (1, 5, 7)})
    assert list(curves(only(target_bars(records)))) == ["source", "tent", "tsd"]
    assert "(3) are left out" in only(along_stream(records, trace, ACCURACY)).caption


# Masks


def test_dice_by_hand() -> None:
    truth, answer = np.zeros((3, 2, 2)), np.zeros((3, 2, 2))
    truth[0, 0], answer[0, 0, 0], answer[1, 0, 0] = 1, 1, 1
    assert example_dice(truth, answer) == pytest.approx((2 / 3 + 0) / 2)  # the third is in neither
    assert math.isnan(example_dice(truth[2:], answer[2:]))


def test_masks_side_by_side() -> None:
    records, trace = study(masks=True)
    found = list(mask_examples(records, trace))
    assert [figure.title.rpartition(" ")[2] for figure in found] == ["paint", "photo"]
    image, truth, before, after = found[0].panels[:4]
    for panel in (image, truth, before, after):
        assert isinstance(panel, ImagePanel)
    assert [panel.title for panel in found[0].panels[:4]] == ["image", "truth", "source", "tsd"]
    arrays = trace(next(r for r in records if r["settings"]["method"] == "tsd"))
    assert arrays is not None
    assert isinstance(after, ImagePanel)
    assert np.array_equal(after.outlines["cup"], arrays["answer"][0, 1])
    assert after.note == f"Dice {100 * example_dice(arrays['truth'][0], arrays['answer'][0]):.1f} %"


# All


def test_figures_in_their_order_with_traces_read_once() -> None:
    records, trace = study(batches=(10, 20), values={"neighbors": (1, 5)}, images=60)
    asked: list[Any] = []

    def look(made: Record) -> Any:
        asked.append(made["id"])
        return trace(made)

    names = [figure.name.partition("-digits")[0] for figure in make_figures(records, look)]
    along = ["accuracy-along", "by-target", "by-target", "entropy-along", "agreement-along", "confusion", "features"]
    assert names == [*along, "alignment-uniformity", "batch-size", "sensitivity-tsd", "sensitivity-tsd"]
    shown = [r for r in records if r["settings"]["batch"] == 20 and r["settings"]["hyper"].get("neighbors", 3) == 3]
    assert sorted(asked) == sorted(r["id"] for r in shown)
    names = [figure.name.partition("-digits")[0] for figure in make_figures(*study(masks=True))]
    assert names == ["by-target", "masks", "masks", "dice-along"]


def test_old_records_have_fewer_figures() -> None:
    records, _ = study(images=20)
    old = [{k: v for k, v in r.items() if k != "trace"} | {"results": {"accuracy": 0.5}} for r in records]
    assert [figure.name for figure in make_figures(old, lambda _: None)] == ["by-target-digits"]
    assert make_figures([], lambda _: None) == []
