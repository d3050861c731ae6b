"""Read the numbers of one quantised matrix of a checkpoint. Codes of the same number type are
converted to the same layout, whichever format the checkpoint has.

Only this module knows the order of codes in each format. float8, int8 and mxfp4 store codes along a
row. GPTQ packs codes along a column into words (https://github.com/AutoGPTQ/AutoGPTQ). AWQ packs
codes of neighbouring columns into words, in a special order
(https://github.com/casper-hansen/AutoAWQ). compressed-tensors packs codes along a row.
"""

from dataclasses import dataclass

import torch
from specdec_kernels.linear.stored import INT4, INT8, LARGEST_POWER, packed

from specdec_cli.errors import SetupError
from specdec_cli.models.formats import AWQ, BLOCKS, GPTQ, PACKED, PLAIN, Matrices
from specdec_cli.models.weights import Part, Read, same

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word holds each of its eight columns
_NO_POWER = 255  # this exponent of a scale means NaN
DAMAGED = "the weights are damaged or do not match this config.json; download them again"


def damaged(message: str) -> SetupError:
    return SetupError(message, DAMAGED)


def said(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of {list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A quantised matrix of a file. Its methods raise a `SetupError` that names it if its tensors
    do not fit.

    own: readers of its tensors, by what these contain, such as "codes" or "scales".
    group: the group of the config to which it belongs.
    name: its name for messages.
    """

    own: dict[str, Read]
    group: Matrices
    name: str

    @property
    def bits(self) -> int:
        return 4 if self.group.storage.kind == INT4 else 8

    def codes(self, part: Part | None = None) -> torch.Tensor:
        own, group, found = self.own, self.group, self.own["codes"]()
        if "zeros" in own and not group.storage.has_zeros:
            self._check_no_zeros()
        match group.form:
            case "plain":
                return same(found, part)
            case "packed":
                numbers = self._numbers(found)
                self._check_order(numbers.shape[1])
                if "shape" in own:
                    rows, columns = self._shape(numbers)
                    numbers = numbers[:rows, :columns]
            case "gptq":
                numbers = self._numbers(found.T)
                self._check_order(numbers.shape[1])
            case "awq":
                numbers = _ordered(self._numbers(found)).T
            case _:  # two neighbouring codes share one byte
                if found.dtype != torch.uint8 or found.dim() < 2:
                    raise self._damaged(f"has codes that are {said(found)}, not uint8")
                found = found.flatten(-2) if group.form == BLOCKS else found
                numbers = torch.stack((found & 15, found >> 4), -1).flatten(-2)
        if (columns := numbers.shape[-1]) % 2:
            raise SetupError(f"{self.name} has {columns} columns, but their number must be even")
        return same(_signed(numbers) if group.storage.kind == INT8 else packed(numbers), part)

    def scales(self, part: Part | None = None) -> torch.Tensor:
        group, dtype, found = self.group, self.group.storage.scales, self.own["scales"]()
        if group.form in (GPTQ, AWQ) and found.dim() == 2:
            found = found.T
        if dtype == torch.uint8 and found.dtype != dtype:
            raise self._damaged(f"has scales that are {said(found)}, not uint8")
        if found.dtype == torch.uint8 and bool((found == _NO_POWER).any()):
            raise self._damaged(f"has scales that are not numbers ({_NO_POWER} means NaN)")
        if dtype == torch.uint8:
            if bool((found > LARGEST_POWER).any()):
                raise self._damaged(f"has scales above 2^{LARGEST_POWER - 127}")
            return same(found, part)
        if found.dtype == torch.uint8:  # exponents of powers of two
            found = (found.float() - 127).exp2()
        if not found.is_floating_point() or (dtype != torch.float32 and found.dtype != dtype):
            raise self._damaged(f"has scales that are {said(found)}, not {dtype}")
        found = found.to(dtype)
        if not bool(found.isfinite().all()):
            raise self._damaged("has scales that are not numbers (NaN or infinite)")
        if group.one_scale or found.dim() == 1:
            *stacked, rows, _ = self.own["codes"]().shape or (1, 1)
            count = 1 if group.one_scale else rows
            if found.numel() == torch.Size(stacked).numel() * count:
                found = found.reshape(*stacked, count, 1).expand(*stacked, rows, 1)
        return same(self._of_columns(found), part)

    def zeros(self, part: Part | None = None) -> torch.Tensor:
        if "zeros" not in self.own:
            raise self._damaged("lacks its zeros, but quantization_config says that it has some")
        group, found = self.group, self.own["zeros"]()
        if group.form == PLAIN:
            if found.dtype != torch.int8:
                raise self._damaged(f"has zeros that are {said(found)}, not int8")
            if found.numel() == 1 or found.dim() == 1:
                found = found.reshape(-1, 1).expand(self.own["codes"]().shape[0], 1)
            return same(found, part)
        if group.form == PACKED:
            zeros = self._packed_zeros(found)
        elif group.form == AWQ:
            zeros = _ordered(self._numbers(found)).T
        else:
            zeros = self._numbers(found).T
            # GPTQ's packers store each zero point minus one, so a zero point of 0 is stored as all
            # ones.
            zeros = zeros + group.zeros_less_one & (1 << self.bits) - 1
        zeros = self._of_columns(zeros)
        return same(zeros if self.bits == 4 else _signed(zeros), part)

    def _damaged(self, what: str) -> SetupError:
        return damaged(f"{self.name} {what}")

    def _packed_zeros(self, found: torch.Tensor) -> torch.Tensor:
        """Unpack the zero points of a matrix [R, C] from int32 words along its columns. Leave out
        the rows that only pad the last word."""
        zeros, rows = self._numbers(found.T).T, len(self.own["codes"]())
        return zeros[:rows] if 0 <= len(zeros) - rows < 32 // self.bits else zeros

    def _check_no_zeros(self) -> None:
        """Raise `SetupError` if the config says that the matrix has no zero points, but the file
        has zero points other than the middle of the codes' range."""
        found, group = self.own["zeros"](), self.group
        if group.form == PLAIN:
            has_zeros = bool(found.any())
        else:
            if group.form == PACKED:
                numbers = self._packed_zeros(found)
            else:
                numbers = self._numbers(found) + group.zeros_less_one
            has_zeros = bool((numbers != 1 << self.bits - 1).any())
        if has_zeros:
            key = {GPTQ: "sym", AWQ: "zero_point"}.get(
                group.form, "config_groups.weights.symmetric"
            )
            raise self._damaged(f"has zeros, but quantization_config.{key} says that it has none")

    def _numbers(self, words: torch.Tensor) -> torch.Tensor:
        """Unpack int32 words [R, W] into uint8 [R, W * 32 / bits]. The first value of a word is in
        its lowest bits."""
        if words.dtype != torch.int32 or words.dim() != 2:
            raise self._damaged(f"holds {said(words)}, not int32 of two dimensions")
        rows, columns = words.shape
        found = words.reshape(-1).view(torch.uint8).view(rows, 4 * columns)
        return found if self.bits == 8 else torch.stack((found & 15, found >> 4), -1).flatten(-2)

    def _shape(self, numbers: torch.Tensor) -> tuple[int, int]:
        """Return the shape that the file states, after checking it. The unpacked `numbers` may have
        up to 7 more columns, because packed words are padded. Raises `SetupError` for any other
        difference."""
        found = self.own["shape"]()
        is_whole = found.shape == (2,) and found.dtype in (torch.int32, torch.int64)
        rows, columns = found.tolist() if is_whole else (0, 0)
        if rows != len(numbers) or not 0 <= numbers.shape[1] - columns < 8:
            raise damaged(
                f"the weight_shape of {self.name} is {found.tolist()}, but its packed words hold a "
                f"matrix of shape {list(numbers.shape)}"
            )
        return rows, columns

    def _check_order(self, columns: int) -> None:
        """Raise `SetupError` if the file's `g_idx` does not assign columns to groups from left to
        right, but the config does not say that columns are permuted."""
        wide = self.group.storage.group[1]
        if "order" not in self.own or self.group.ordered:
            return
        places = torch.arange(columns) // (wide or columns)
        if not torch.equal(self.own["order"]().long(), places):
            raise self._damaged(
                "permutes its columns (g_idx), but quantization_config.desc_act says that it does "
                "not"
            )

    def _of_columns(self, found: torch.Tensor) -> torch.Tensor:
        """Return one scale or zero point per group, or one per column if the file permutes
        columns."""
        if not self.group.ordered:
            return found
        if "order" not in self.own:
            raise self._damaged("lacks the order of its columns (g_idx)")
        order = self.own["order"]().long()
        if order.dim() != 1 or int(order.min()) < 0 or int(order.max()) >= found.shape[1]:
            raise self._damaged("has columns in groups that have no scale (g_idx)")
        return found[:, order]


def _ordered(numbers: torch.Tensor) -> torch.Tensor:
    """Put columns that were unpacked from AWQ's words into their natural order."""
    rows, columns = numbers.shape
    return numbers.view(rows, columns // 8, 8)[..., _AWQ_PLACES].flatten(-2)


def _signed(numbers: torch.Tensor) -> torch.Tensor:
    """Map numbers 0..255 to int8 by subtracting 128."""
    return (numbers.short() - 128).to(torch.int8)
