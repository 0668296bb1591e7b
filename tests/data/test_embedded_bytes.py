"""Embedded data: the same bytes in another process, in another order, with another hash seed."""

import hashlib
import os
import subprocess
import sys

from trueup.data.datasets import digits, phantoms

STYLES = ("type", "neon")  # one of each kind: fonts and handwriting
FRESH = """
import hashlib
from trueup.data.datasets import digits, phantoms
for dataset, domains in reversed(phantoms.DOMAINS.items()):
    for domain in reversed(domains):
        for i in (5, 1):
            volume = phantoms.phantom_cases(dataset, domain)[i].read()
            print(dataset, domain, i, hashlib.sha256(volume.image.tobytes() + volume.mask.tobytes()).hexdigest())
for domain in map(digits.digits_domain, ("neon", "type")):
    print(domain.name, hashlib.sha256(domain.images.tobytes() + domain.labels.tobytes()).hexdigest())
"""


def test_the_same_bytes_come_from_another_process_and_order() -> None:
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    fresh = subprocess.run([sys.executable, "-c", FRESH], check=True, capture_output=True, text=True, env=env).stdout
    here = set()
    for dataset, domains in phantoms.DOMAINS.items():
        for domain in domains:
            for i in (1, 5):
                volume = phantoms.phantom_cases(dataset, domain)[i].read()
                assert volume.mask is not None
                digest = hashlib.sha256(volume.image.tobytes() + volume.mask.tobytes()).hexdigest()
                here.add(f"{dataset} {domain} {i} {digest}")
    for style in STYLES:
        drawn = digits.digits_domain(style)
        digest = hashlib.sha256(drawn.images.tobytes() + drawn.labels.tobytes()).hexdigest()
        here.add(f"{style} {digest}")
    assert set(fresh.splitlines()) == here
