"""Triton's interpreter in less than half the time, with the same results, and right for fp8.

It spends nearly all of its time on objects that describe types. Each patch keeps what a function
returns for the same arguments, or leaves out what nothing reads. Its conversions to fp8 round ties
away from zero, lose the carry of a mantissa, truncate denormal numbers and know no NaN.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

CHECKED = "binary_op_type_checking_impl"
KEEPING = ("int32", "int64", "fp32")  # which operations of two such operands compute in
INT32 = range(-(2**31), 2**31)
INTEGERS = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)
Key = tuple[Any, ...]


def make_faster(patch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter, if this release of Triton has the functions that are known here."""
    patch.setattr(interpreter, "_convert_float", converted(interpreter._convert_float))
    names = ("_LangPatchScope", "_patch_attr", "_patch_builtin", "_patch_lang", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in names):
        return
    # Without `debug` a launch computes whether integers overflow, and then asserts nothing.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    patch.setattr(interpreter, "_get_np_dtype", kept_dtypes(interpreter._get_np_dtype))
    patch.setattr(tl.block_type, "__init__", kept_blocks(tl.block_type.__init__))
    patch.setattr(tl.tensor, "__init__", kept_shapes(tl.tensor.__init__))
    patch.setattr(tl.dtype, "__eq__", equal_at_once(tl.dtype.__eq__))
    patch.setattr(tl.dtype, "is_int", lambda self: self.name in INTEGERS)
    patch.setattr(interpreter, "_patch_attr", patch_without_wrapper)
    patch.setattr(interpreter, "_patch_builtin", kept_builtins())
    patch.setattr(interpreter, "_patch_lang", once_a_launch(interpreter._patch_lang))
    semantic = type(interpreter.interpreter_semantic)
    for name, make in (("broadcast_impl_value", kept_broadcasts), (CHECKED, unchecked_operands)):
        if hasattr(semantic, name):
            patch.setattr(semantic, name, make(getattr(semantic, name)))


def converted(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Conversions as torch makes them where one side is fp8. Numbers out of its range become NaN,
    as the format's conversions without saturation do: kernels have to clamp."""
    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    kinds["fp8e4nv"] = torch.float8_e4m3fn

    def convert_fp8(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return convert(data, source, target, rounding)
        numbers = torch.from_numpy(np.array(data)).view(kinds[source.name]).float()
        found = numbers.masked_fill(numbers.abs() > 464, float("nan")).to(kinds[target.name])
        return found.view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy()

    return convert_fp8


def kept_dtypes(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def kept(of: Any) -> Any:
        scalar = of.element_ty if type(of) is tl.block_type else of
        if type(scalar) is not tl.dtype:
            return numpy_dtype(of)
        if scalar.name not in found:
            found[scalar.name] = numpy_dtype(of)
        return found[scalar.name]

    return kept


def named(type: Any) -> Key:
    """A type's name, and for pointers what it leaves out."""
    return type.name, getattr(type.scalar, "address_space", None)


def kept_blocks(init: Callable[..., None]) -> Callable[..., None]:
    """A block's type is never changed, so its parts serve all blocks of its dtype and shape."""
    made: dict[Key, dict[str, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) not in (tl.dtype, tl.pointer_type):
            return init(self, element_ty, shape)
        key = (*named(element_ty), *shape)
        if key not in made:
            init(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    return init_block


def kept_shapes(init: Callable[..., None]) -> Callable[..., None]:
    made: dict[Key, Key] = {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in made:
            init(self, handle, type)
            made[key] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = made[key]

    return init_tensor


def kept_broadcasts(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the types that operands are brought to, which follow from theirs; None where an operand
    stays as it is."""
    made: dict[Key, tuple[Any, Any]] = {}

    def to_type(self: Any, operand: Any, type: Any) -> Any:
        if type is None:
            return operand
        if operand.type.is_block():
            return self.make_tensor(self.builder.create_broadcast(operand.handle, type.shape), type)
        return self.make_tensor(self.builder.create_splat(type, operand.handle), type)

    def broadcast_operands(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type is rhs.type:
            return lhs, rhs
        key = (*named(lhs.type), *named(rhs.type))
        if key not in made:
            left, right = broadcast(self, lhs, rhs)
            made[key] = None if left is lhs else left.type, None if right is rhs else right.type
        return to_type(self, lhs, made[key][0]), to_type(self, rhs, made[key][1])

    return broadcast_operands


def unchecked_operands(check: Callable[..., Any]) -> Callable[..., Any]:
    """Two operands of a type that operations keep, or a 32-bit integer and a number that fits, need
    one shape only."""

    def operands(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if type(lhs) is tl.tensor:
            name = lhs.dtype.name
            if type(rhs) is tl.tensor and rhs.dtype.name == name and name in KEEPING:
                return self.broadcast_impl_value(lhs, rhs)
            if type(rhs) is int and name == "int32" and rhs in INT32:
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        return check(self, lhs, rhs, *args, **kwargs)

    return operands


def equal_at_once(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def equal_dtypes(self: Any, other: Any) -> bool:
        if type(other) is tl.dtype:
            return bool(self.name == other.name)
        return equal(self, other)

    return equal_dtypes


def patch_without_wrapper(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Call a builtin past its wrapper, which only checks that `_semantic` is given."""
    function = getattr(member, "__wrapped__", member)

    def with_semantic(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, with_semantic)


def kept_builtins() -> Callable[..., None]:
    """List a module's members once. One that is patched already is no builtin any more."""
    names: dict[Any, list[str]] = {}

    def patch_builtins(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:
            names[pkg] = [n for n, m in inspect.getmembers(pkg) if tl.core.is_builtin(m)]
        for name in names[pkg]:
            member = getattr(pkg, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    return patch_builtins


def once_a_launch(patch_lang: Callable[..., Any]) -> Callable[..., Any]:
    """Patch triton.language once a launch. The interpreter does it at the launch and again at each
    call of a device function."""
    sees: dict[Any, tuple[bool, bool]] = {}
    patched: set[tuple[bool, bool]] = set()

    def patch_once(fn: Callable[..., Any]) -> Any:
        if fn not in sees:
            values = list(fn.__globals__.values())
            sees[fn] = (any(v is tl for v in values), any(v is tl.core for v in values))
        if sees[fn] in patched:
            return None  # only a launch, which comes first, reads it
        patched.add(sees[fn])
        scope = patch_lang(fn)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch_once
