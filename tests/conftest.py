"""One thread per test process: sums are added in one order, and two processes share two cores."""

import torch

torch.set_num_threads(1)
