"""One thread per test process: sums are added in one order, and two processes share two cores."""

import os

import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
