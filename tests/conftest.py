"""Settings and fixtures for all tests."""

import gc
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec

# Tiny models gain nothing from threads, and two pools of spinning threads slow two cores down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell's background job ignores SIGINT, and a program under nohup ignores SIGHUP. Programs that a
# test starts would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
import torch

# Without a device the kernels run in Triton's interpreter. Every `triton.jit` reads this, even in
# Triton, so it is set before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# Machines that are set up by hand for tests on a device may lack these two.
if find_spec("gguf") is None or find_spec("accelerate") is None:
    collect_ignore_glob = ["*/test_gguf*.py"]


@pytest.fixture(scope="session", autouse=True)
def imported_once() -> Iterator[None]:
    """Freeze imported objects: they live to the end, and the collector need not traverse them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; CUDA only if there is one."""
    return torch.device(request.param)
