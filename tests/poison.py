"""A plugin of pytest's that fills memory which torch leaves as it was: `pytest -p tests.poison`.

Floating-point numbers are NaN and integers are their type's largest. A test that reads what nothing
has written fails each time then, and not only when the memory held such numbers before.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before torch imports Triton, as in fixtures.py

import torch

torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills in this mode alone
torch.utils.deterministic.fill_uninitialized_memory = True
