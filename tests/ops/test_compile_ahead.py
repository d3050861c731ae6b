"""Compiling kernels ahead: what runs meanwhile, and what it finds in memory."""

import torch
from ops_helpers import needs_cuda
from specdec_kernels import ops
from specdec_kernels.compile_ahead import _launches_that_compile, _ZerosForEmpty, compile_ahead
from torch import Tensor


def test_nothing_runs_on_a_cpu():
    ran = []
    compile_ahead(lambda: ran.append(1), torch.device("cpu"))
    assert not ran


def test_launches_become_warm_ups():
    class Kernel:
        def run(self, *args, grid, warmup, **options):
            return self, args, grid, warmup, options

    kernel = Kernel()
    with _launches_that_compile(Kernel):
        assert kernel.run(1, grid=(2,), warmup=False, num_warps=4) == (
            *(kernel, (1,), (2,), True),
            {"num_warps": 4},
        )
    assert kernel.run(grid=(2,), warmup=False) == (kernel, (), (2,), False, {})


def test_uninitialised_tensors_are_zeros(monkeypatch):
    monkeypatch.undo()  # what fills them with NaN or absurd integers in these tests

    def made() -> list[Tensor]:
        like = torch.full((1 << 12,), 7)
        del like
        like = torch.full((1 << 12,), 7)
        return [torch.empty(1 << 12), torch.empty_like(like), like.new_empty(1 << 12), like]

    with _ZerosForEmpty():
        assert [int(tensor.count_nonzero()) for tensor in made()] == [0, 0, 0, 1 << 12]


@needs_cuda
def test_kernels_are_compiled_and_do_not_run(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # An odd shape, which no other test has compiled.
    x, weight = torch.randn(3, 136, device=device), torch.randn(88, 136, device=device)
    out = torch.full((3, 88), 7.0, device=device)
    compile_ahead(lambda: ops.linear(x, weight, into=out), device)
    assert (out == 7.0).all()
    binaries = set(tmp_path.glob("*/*.cubin"))
    assert binaries
    ops.linear(x, weight, into=out)
    assert set(tmp_path.glob("*/*.cubin")) == binaries
    assert torch.allclose(out, x @ weight.T, atol=1e-3)
