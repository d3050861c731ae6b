"""Passes that fetch the host's words from two pieces in turn, and write their tokens back."""

import pytest
import torch
from specdec_kernels import ops
from specdec_kernels.comm.staging_triton import fetch_staged_triton, tell_tokens_triton
from torch import Tensor

POISON = -77


def on_host(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, POISON, dtype=dtype, pin_memory=device.type == "cuda")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@pytest.mark.parametrize("is_triton", [False, True])
@pytest.mark.parametrize("num_words", [1, 7, 2048, 4100])
def test_words_come_from_the_pieces_in_turn(num_words, is_triton, device):
    fetch = fetch_staged_triton if is_triton else ops.fetch_staged
    staged = on_host((2, num_words), torch.int32, device)
    words = torch.full((num_words + 3,), POISON, dtype=torch.int32, device=device)
    for passes in range(3):
        piece = torch.arange(num_words, dtype=torch.int32) + 10_000 * passes
        staged[passes % 2] = piece
        fetch(words[:num_words], staged, torch.tensor([passes], dtype=torch.int32, device=device))
        wait(device)
        assert torch.equal(words[:num_words].cpu(), piece)
        assert (words[num_words:] == POISON).all()


@pytest.mark.parametrize("is_triton", [False, True])
@pytest.mark.parametrize("count", [None, 1, 3, 5])
def test_tokens_are_told_in_the_same_piece_and_the_pass_is_counted(count, is_triton, device):
    tell = tell_tokens_triton if is_triton else ops.tell_tokens
    told, ended = (on_host(shape, dtype, device) for shape, dtype in (
        ((2, 5), torch.int64), ((1,), torch.int32)
    ))  # fmt: skip
    passes = torch.tensor([6], dtype=torch.int32, device=device)
    for number in (6, 7):
        tokens = None
        if count is not None:
            tokens = torch.arange(count, device=device) * 3 + number + 2**40
        tell(passes, tokens, told, ended)
        wait(device)
        assert passes.tolist() == ended.tolist() == [number + 1]
        expected = [POISON] * 5
        if tokens is not None:
            expected[:count] = tokens.tolist()
        assert told[number % 2].tolist() == expected
        if number == 6:
            assert (told[1] == POISON).all()
