"""Peak memory that a TSD step adds, by default and with memory="low".

1,000 classes, a full bank (M = 100), 224 pixels, batches of 32; one process per variant; the peak counts from before
the first step. Freed memory returns to the system at once, so that resident memory is memory in use.

Run: python benchmarks/peak.py [--quick]
"""

import sys
from typing import Any

from measure import write
from step import M
from throughput import CASES, in_a_process

BATCH = 32
VARIANTS = ("tsd-all", "tsd-low")


def measure(name: str, late: str, batch: int, size: int, per_class: int) -> list[dict[str, Any]]:
    found = {variant: in_a_process(name, variant, late, batch, size, per_class) for variant in VARIANTS}
    return [
        {
            "network": name,
            "variant": variant,
            "batch": batch,
            "pixels": size,
            "per_class": per_class,
            **row,
            "step_over_all": round(row["step_mb"] / found["tsd-all"]["step_mb"], 3),
        }
        for variant, row in found.items()
    ]


def main() -> None:
    quick, rows = "--quick" in sys.argv, []
    for name, _, _, late in CASES[:1] if quick else CASES:
        for row in measure(name, late, 2 if quick else BATCH, 64 if quick else 224, 2 if quick else M):
            rows.append(row)
            print(
                f"{row['network']:8} {row['variant']:8}: a step adds {row['step_mb']:.0f} MB, "
                f"{row['step_over_all']:.2f} of that of all; held before: {row['holds_mb']:.0f} MB",
                flush=True,
            )
    if not quick:
        write("peak", rows)


if __name__ == "__main__":
    main()
