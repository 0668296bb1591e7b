"""Small hyper-parameters of methods, for tests on short streams.

They reach within a few batches what defaults reach late or never: memories that are full, updates in the middle of a
batch, votes of neighbours, fresh starts.
"""

from typing import Any

SMALL: dict[tuple[str, str], dict[str, Any]] = {
    ("adacontrast", "classification"): {"warmup": 24, "capacity": 60, "neighbors": 3},
    ("cotta", "classification"): {"views": 4, "chunk": 48},
    ("memo", "classification"): {"views": 3},
    ("note", "classification"): {"capacity": 20, "every": 20},
    ("rdumb", "classification"): {"every": 4},
    ("rdumb", "segmentation"): {"every": 4},
    ("rotta", "classification"): {"capacity": 20, "every": 20},
    ("t3a", "classification"): {"per_class": 5},
    ("tast", "classification"): {"per_class": 5, "members": 3},
    ("tast-bn", "classification"): {"per_class": 4, "capacity": 18},
    ("tsd", "classification"): {"per_class": 5},
    ("tsd", "segmentation"): {"neighbors": 8, "samples": 8, "queries": 128},
}
