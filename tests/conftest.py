"""Settings and fixtures of every test."""

import gc
import os
import signal
from collections.abc import Iterator

# Tiny models gain nothing from threads, and two pools of spinning threads on two cores lose much.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell's background job ignores SIGINT and what nohup starts ignores SIGHUP, and so would every
# program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
import torch

# Read by every `triton.jit`, Triton's own functions included, hence set before anything imports it:
# without a device the kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def imported_once() -> Iterator[None]:
    """What is imported by now lives to the end, and the collector need not go through it again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; CUDA only where there is one."""
    return torch.device(request.param)
