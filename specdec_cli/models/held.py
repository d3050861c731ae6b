"""Parameters of a module that stay as stored in the checkpoint, or are borrowed from the target."""

import ctypes
from typing import Any, Self

import torch
from specdec_kernels.linear.stored import Storage, Stored, plain_of
from torch import Tensor, nn

LARGE = 1 << 18  # moving a weight with this many values leaves much unused memory behind


class StoredParameter(nn.Parameter):
    """A parameter with the shape and dtype that a module needs, but without plain values. value:
    the stored weight; None on meta. is_transposed: whether the module's last two dimensions are
    exchanged."""

    stored_as: Storage
    value: Stored | None
    is_transposed: bool

    @classmethod
    def like(
        cls,
        parameter: Tensor,
        storage: Storage,
        value: Stored | None = None,
        *,
        is_transposed: bool = False,
    ) -> Self:
        device = "meta" if value is None else value.codes.device
        none = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
        found = cls(none.expand(parameter.shape), requires_grad=False)
        found.stored_as, found.value, found.is_transposed = storage, value, is_transposed
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        found = type(self).like(self, self.stored_as, self.value, is_transposed=self.is_transposed)
        memo[id(self)] = found
        return found

    @property
    def shape_written(self) -> tuple[int, ...]:
        """[..., features written, features read]."""
        *outer, rows, columns = self.shape
        return (*outer, columns, rows) if self.is_transposed else (*outer, rows, columns)


def weight_of(parameter: Tensor) -> Tensor | Stored:
    """The weight of a module's parameter, in the form in which it is held."""
    if not isinstance(parameter, StoredParameter):
        return parameter.data
    assert parameter.value is not None, "on meta"
    return parameter.value


def held_bytes(parameter: Tensor) -> int:
    """Bytes of a module's parameter on a device. The parameter may be on meta."""
    if isinstance(parameter, StoredParameter):
        return parameter.stored_as.num_bytes(parameter.shape_written)
    return parameter.numel() * parameter.element_size()


def plain_weight(parameter: Tensor) -> Tensor:
    """The numbers of a module's parameter; on meta, the parameter itself."""
    if isinstance(parameter, StoredParameter) and parameter.value is None:
        return parameter.data
    found = plain_of(weight_of(parameter), parameter.dtype)
    is_transposed = isinstance(parameter, StoredParameter) and parameter.is_transposed
    return found.transpose(-1, -2) if is_transposed else found


def lendable(model: Any) -> dict[str, Any]:
    """The modules of a transformers model whose weights a draft may borrow, by their names in
    `draft.share`."""
    return {"embeddings": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}


def borrowed_weights(draft: Any, target: Any, share: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """The target's weights for the draft module, by their names in the draft. Modules themselves
    are not shared, because those of some families scale their outputs."""
    names = {id(module): name for name, module in draft.named_modules()}
    ours, theirs = lendable(draft), lendable(target)
    return {f"{names[id(ours[what])]}.weight": theirs[what].weight for what in share}


def return_unused(device: torch.device) -> None:
    """Return memory that is free in torch's reserve, or in glibc's heap, to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
