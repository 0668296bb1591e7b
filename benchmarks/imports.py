"""Time of `import trueup` against `import torch`: five processes each, in turns.

Run: python benchmarks/imports.py [--quick]
"""

import subprocess
import sys
from functools import partial

from measure import milliseconds, take_turns, write


def load(module: str, _: None) -> None:
    """Import a module in a new process."""
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


def main() -> None:
    """Measure, print, and save the record."""
    rounds = 1 if "--quick" in sys.argv else 5
    times = take_turns({name: partial(load, name) for name in ("torch", "trueup")}, rounds, lambda: None)
    ours, torch = milliseconds(times["trueup"]), milliseconds(times["torch"])
    print(f"import trueup: {ours:.0f} ms, import torch: {torch:.0f} ms; ratio of medians {ours / torch:.3f}")
    if rounds > 1:
        write("imports", [{"trueup_ms": ours, "torch_ms": torch, "ratio_of_medians": round(ours / torch, 4)}])


if __name__ == "__main__":
    main()
