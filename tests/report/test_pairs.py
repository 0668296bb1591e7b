"""Figures compare methods on the same runs, and count what is zero."""

import pytest
from test_record_figures import curves, only, record, shaped

from trueup.report.feature_space import geometry
from trueup.report.record_figures import batch_sizes


def test_lines_and_points_are_of_runs_that_all_methods_have() -> None:
    runs = [shaped("source", s, value, -value, [value, value]) for s, value in ((0, 0.2), (1, 1.0))]
    runs += [shaped("tsd", s, value, -value, [value, value]) for s, value in ((0, 0.2), (1, 1.0))]
    runs += [shaped("bn", 0, 0.2, -0.2, [0.2, 0.2])]  # half done, and no different where it is
    figure = only(geometry(runs))
    plane = curves(figure, len(figure.panels) - 1)
    assert plane["bn"].x == plane["source"].x == plane["tsd"].x == pytest.approx((-0.2,))
    assert "the 1 of 2 runs that all these methods have" in figure.caption


def test_a_method_with_hardly_any_run_is_left_out() -> None:
    runs = [shaped(m, s, 0.5, -1.0, [0.5, 0.5]) for m in ("source", "tsd") for s in range(4)]
    runs += [shaped("bn", 0, 0.5, -1.0, [0.5, 0.5])]
    figure = only(geometry(runs))
    assert set(curves(figure, len(figure.panels) - 1)) == {"source", "tsd"}
    assert "Not shown, with too few runs: bn." in figure.caption


def test_an_accuracy_of_zero_counts() -> None:
    runs = [record("tent", t, 0, value, batch=size) for size in (1, 8) for t, value in (("a", 0.0), ("b", 0.8))]
    assert curves(only(batch_sizes(runs)), 0)["tent"].y == pytest.approx((40, 40))
