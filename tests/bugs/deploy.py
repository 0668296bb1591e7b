"""Bugs of comparison without labels: name, place, old, new, tests."""

ROWS = [
    (
        "compare: a collapsed model looks sure",
        "aetta_error",
        "diversity.clamp(min=1e-6) ** POWER",
        "1.0",
        "test_compare",
    ),
    ("compare: a source that is lost is believed", "_source_is_lost", "peer.value < LOST", "False", "test_estimates"),
    ("compare: too few images decide", "_choose", "ahead.value <= ahead.doubt", "False", "test_estimates"),
    ("compare: presets have no guard", "Trial.adapter", "Guard() if self.guard else None", "None", "test_compare"),
]
