"""Bugs of tables of the report: name, place, old, new, tests."""

ROWS = [
    (
        "tables: deviation of the population",
        "Cell.over",
        "sum(squares) / (len(numbers) - 1)",
        "sum(squares) / len(numbers)",
        "test_tables",
    ),
    (
        "tables: oracle is marked",
        "mark_best",
        'cell is not None and row.select != "oracle" and not math.isnan(cell.mean)',
        "cell is not None and not math.isnan(cell.mean)",
        "test_tables",
    ),
    (
        "masks: tables show accuracy",
        "make_tables",
        "METRICS[metric] if metric else metric_of(group)",
        'METRICS[metric or "accuracy"]',
        "test_tables",
    ),
    ("paper table: seconds of targets are averaged", "", 'SUMMED = ("seconds",)', "SUMMED = ()", "test_paper_table"),
    (
        "paper table: a seed that lacks a target counts",
        "values_of",
        "None not in values",
        "any(values)",
        "test_paper_table",
    ),
]
