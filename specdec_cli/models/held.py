"""Parameters of a module that keep the checkpoint's quantised form, or that are borrowed from the
target."""

import ctypes
from typing import Any, Self

import torch
from specdec_kernels.linear.stored import Storage, Stored, plain_of
from torch import Tensor, nn

# After a weight with at least this many values has been moved, unused memory is returned. Smaller
# weights free so little memory that this is not worth the time.
LARGE = 1 << 18


class StoredParameter(nn.Parameter):
    """A parameter that keeps the checkpoint's quantised form. It has the shape and dtype that a
    module needs, but its own values are NaN; the weight is in `value`.

    stored_as: the quantised form.
    value: the stored weight; None on meta.
    is_transposed: whether the module and the stored weight have their last two dimensions in
    opposite order.
    """

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
        """The shape of the stored weight, [..., output features, input features]."""
        *outer, rows, columns = self.shape
        return (*outer, columns, rows) if self.is_transposed else (*outer, rows, columns)


def weight_of(parameter: Tensor) -> Tensor | Stored:
    """Return the weight of a module's parameter as it is stored, whether quantised or not. The
    parameter may be on meta."""
    if not isinstance(parameter, StoredParameter):
        return parameter.data
    if parameter.value is None:
        return parameter.stored_as.on_meta(parameter.shape_written)
    return parameter.value


def held_bytes(parameter: Tensor) -> int:
    """Return the bytes that a module's parameter takes on a device. The parameter may be on
    meta."""
    if isinstance(parameter, StoredParameter):
        return parameter.stored_as.num_bytes(parameter.shape_written)
    return parameter.numel() * parameter.element_size()


def plain_weight(parameter: Tensor) -> Tensor:
    """Return the values of a module's parameter, dequantised if it is quantised. On meta, return
    the parameter itself."""
    if isinstance(parameter, StoredParameter) and parameter.value is None:
        return parameter.data
    found = plain_of(weight_of(parameter), parameter.dtype)
    is_transposed = isinstance(parameter, StoredParameter) and parameter.is_transposed
    return found.transpose(-1, -2) if is_transposed else found


def lendable(model: Any) -> dict[str, Any]:
    """Return the modules of a transformers model whose weights a draft may borrow, by their names
    in `draft.share`."""
    return {"embeddings": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}


def borrowed_weights(draft: Any, target: Any, share: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """Return the target's weights that a draft borrows, by their parameter names in the draft.

    share: the keys of `lendable` that say which modules' weights to borrow. Only the weights are
    shared, not the modules themselves, because in some families the modules scale their outputs.
    """
    names = {id(module): name for name, module in draft.named_modules()}
    ours, theirs = lendable(draft), lendable(target)
    return {f"{names[id(ours[what])]}.weight": theirs[what].weight for what in share}


def return_unused(device: torch.device) -> None:
    """Free the memory that torch's allocator or glibc's heap keeps in reserve."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
