"""Real PyTorch as the judge: ops, optimizers, whole training runs, DDP and FSDP2 on gloo.

Without PyTorch (extra `oracle`) every module in here is skipped. Run with `-rP` to read the largest
differences that were measured beside what is allowed.
"""

import pytest

pytest.importorskip("torch")
