"""The benchmark: runs, their records, and sweeps over them."""
