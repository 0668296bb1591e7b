"""Records made up for tables whose numbers can be worked out by hand."""

from typing import Any

import pytest

from trueup.report.tables import Cell, Row, Table, make_tables

WIDE = ["gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"]
WIDE += ["snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"]


def record(method: str, target: str, seed: int, value: float | None, **changes: Any) -> dict[str, Any]:
    """A run; `changes` are settings, except for `chosen`, `cost`, `environment`, `results` and `id`."""
    settings = {
        "dataset": "digits",
        "target": target,
        "network": "digits-net",
        "method": method,
        "hyper": {},
        "seed": seed,
        "stream": "iid",
        "stream_options": {},
        "batch": 64,
        "limit": None,
        "reset": False,
        "select": "default",
        "source": {"algorithm": "erm", "iterations": 300, "target": target, "seed": seed},
    }
    rest = {name: changes.pop(name) for name in ("id", "chosen", "cost", "environment", "results") if name in changes}
    settings |= changes
    run = {"id": repr(sorted(settings.items())), "settings": settings, "chosen": None}
    run["cost"] = {"seconds": 2.0, "images_per_second": 480.0, "peak_memory_mb": 400.0}
    run |= {"error": "RuntimeError: boom"} if value is None else {"results": {"accuracy": value, "nll": value}}
    return run | rest


def study() -> list[dict[str, Any]]:
    """Two targets, three methods; tent has not finished `b` with seed 2."""
    values = {
        "tent": {"a": (0.5, 0.6, 0.9), "b": (0.7, 0.7)},
        "source": {"a": (0.4, 0.6, 0.8), "b": (0.5, 0.5, 0.9)},
        "tsd": {"a": (0.6, 0.6, 0.6), "b": (0.7, 0.8, 0.9)},
    }
    return [
        record(method, target, seed, value)
        for method, at in values.items()
        for target, row in at.items()
        for seed, value in enumerate(row)
    ]


def row(table: Table, label: str) -> Row:
    return next(row for row in table.rows if row.label == label)


def cell(table: Table, label: str, column: str) -> Cell | None:
    return row(table, label).cells[[c.name for c in table.columns].index(column)]


def labels(table: Table) -> list[str]:
    return [row.label for row in table.rows]


def only(records: list[dict[str, Any]], **options: Any) -> Table:
    (table,) = make_tables(records, **options)
    return table


def near(found: Cell | None, mean: float, std: float | None, n: int) -> None:
    assert found is not None
    assert (found.mean, found.n) == (pytest.approx(mean, abs=1e-12), n)
    assert found.std == (None if std is None else pytest.approx(std, abs=1e-12))
