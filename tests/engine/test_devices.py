"""The device that a run computes on."""

import pytest
import torch

from specdec_cli.engine.devices import resolve_device
from specdec_cli.errors import SetupError


def test_a_gpu_that_is_not_there_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(SetupError, match="no device cuda:2: this machine has 2 GPUs") as told:
        resolve_device("cuda:2")
    assert "CUDA_VISIBLE_DEVICES" in (told.value.hint or "")
