"""Wrappers that let a plugin's proposer, rule or policy take the place of a built-in one.

They add defaults and checks, so a plugin's class may define as little as one method. A mistake in
it ends the run with a one-line error that names the plugin.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from specdec_cli.acceptance.base import AcceptanceRule, NoForecast
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.drafting import Doubt, Drafting, Stop
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.lengths.base import LastRounds
from specdec_cli.lengths.costs import RoundCosts
from specdec_cli.methods.base import MethodParts, Proposer
from specdec_cli.text import one_line

# The least value of `Verdict.num_accepted` with a meaning: the draft's logits are not finite.
_LEAST_ACCEPTED = -2


@contextmanager
def blamed(who: str, doing: str, about_none: str = "") -> Iterator[None]:
    """Turn errors of a plugin, but not specdec's own errors, into a one-line `UsageError`.

    who: the plugin's name in the message.
    doing: the method that the plugin was running.
    about_none: a hint that is added if the error says that something is None; empty for no hint.
    """
    try:
        yield
    except (SpecdecError, NoForecast, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        told = " ".join(f"{type(problem).__name__}: {problem}".split())
        hint = f"{about_none}; " if about_none and "NoneType" in told else ""
        raise UsageError(f"{who}: {doing} raised {told}", f"{hint}-v shows where") from problem


def built(made: type[Any], given: object) -> Any:
    """Make an object of a plugin's class, and pass `given` to its constructor. A class that defines
    no constructor is called without arguments."""
    return made() if _constructor(made) is object.__init__ else made(given)


def _constructor(made: type[Any]) -> Any:
    """Return the constructor of a class. Those that `typing` puts into protocols, such as
    `AcceptanceRule`, are passed over, as they only call the next one."""
    own = (vars(base)["__init__"] for base in made.__mro__ if "__init__" in vars(base))
    return next(one for one in own if getattr(one, "__module__", None) != "typing")


class WatchedOptions(dict[str, Any]):
    """The recipe's `speculation.options`, in a dict that records which keys plugins read. asked:
    the keys that have been read."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Do the same as `dict.get`, and record that the key was read."""
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Do the same as `dict.setdefault`, and record that the key was read."""
        self.asked.add(key)
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[str]:
        self._ask_all()
        return super().__iter__()

    def keys(self) -> Any:
        """Do the same as `dict.keys`, and record that all keys were read."""
        self._ask_all()
        return super().keys()

    def values(self) -> Any:
        """Do the same as `dict.values`, and record that all keys were read."""
        self._ask_all()
        return super().values()

    def items(self) -> Any:
        """Do the same as `dict.items`, and record that all keys were read."""
        self._ask_all()
        return super().items()

    def _ask_all(self) -> None:
        self.asked |= set(super().keys())

    def refuse_unknown(self) -> None:
        """Raise `UsageError` for a key that no plugin has read."""
        for key in super().keys():
            if key not in self.asked:
                names = ", ".join(sorted(self.asked)) or "none"
                raise UsageError(
                    f"speculation.options.{one_line(key)}: no plugin reads this key",
                    f"keys that plugins read: {names}",
                )


class DeviceCounts:
    """Counts of invalid results, kept on the device so that no round waits for them."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._counts: torch.Tensor | None = None  # int64 [num]

    def add(self, counts: torch.Tensor) -> None:
        """Add `counts`, int64 [num]."""
        if self._counts is None or self._counts.device != counts.device:
            self._counts = torch.zeros(self.num, dtype=torch.int64, device=counts.device)
        self._counts += counts

    def taken(self) -> list[int]:
        """Return the counts since the last call, and set them to 0. This waits for the device."""
        if self._counts is None:
            return [0] * self.num
        found: list[int] = self._counts.tolist()
        with torch.inference_mode():
            self._counts.zero_()  # a captured round adds to this tensor, so it has to stay
        return found


def expect(who: str, name: str, found: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise `UsageError` unless `found` is a tensor of this shape and dtype."""
    if isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (shape, dtype):
        return
    told = type(found).__name__
    if isinstance(found, torch.Tensor):
        told = f"{list(found.shape)} {_word(found.dtype)}"
    raise UsageError(f"{who}: {name} should be {list(shape)} {_word(dtype)}, but is {told}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class PluggedMethod:
    """A proposer that wraps an object of the plugin's class `made`.

    `made` must define `propose`. It need not inherit from `methods.base.Proposer`: the members that
    it lacks are taken from there.
    """

    def __init__(self, name: str, made: type[Any], parts: MethodParts) -> None:
        self.who = f"method {name}"
        self.vocab_size = parts.target.vocab_size
        # Token ids outside the vocabulary, and lengths (`Candidates.lens`) outside 0..caps.
        self._num_invalid = DeviceCounts(2)
        with blamed(self.who, "making it"):
            self.inner = built(type(made.__name__, (made, Proposer), {}), parts)
            self.feature_layers = tuple(self.inner.feature_layers)

    def __getattr__(self, name: str) -> Any:
        """Return the plugin's own attribute of this name. Methods are wrapped, so that the messages
        of their errors name the plugin."""
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            with blamed(self.who, name):
                return found(*args)

        return call

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose tokens. An invalid id ends its sequence's proposals, and `check` reports it."""
        hint = "" if self.inner.needs_text else "state.texts is None without needs_text = True"
        with blamed(self.who, "propose", hint):
            found = self.inner.propose(state, draft)
        if not isinstance(found, Candidates):
            raise UsageError(f"{self.who}: propose should return Candidates, not {found!r:.60}")
        batch = len(draft.caps)
        expect(self.who, "token_ids", found.token_ids, (batch, draft.k), torch.int64)
        expect(self.who, "lens", found.lens, (batch,), torch.int64)
        place = torch.arange(draft.k, device=found.lens.device)
        lens = torch.minimum(found.lens.clamp(min=0), draft.caps)
        ids = found.token_ids
        # The id -1 is allowed. It marks a token drawn from logits that are not finite, and
        # verification reports it.
        invalid = ((ids < -1) | (ids >= self.vocab_size)) & (place < lens[:, None])
        outside = (found.lens != lens) & state.active
        counts = torch.stack((invalid.sum() * state.active.any(), outside.sum()))
        self._num_invalid.add(counts)
        first = torch.where(invalid, place, draft.k).amin(dim=1)
        clamped = ids.clamp(-1, self.vocab_size - 1)
        return Candidates(clamped, torch.minimum(lens, first), found.q)

    def check(self) -> None:
        """Raise `UsageError` if the plugin has proposed ids outside the vocabulary, or returned
        `lens` outside 0..caps, since the last call."""
        with blamed(self.who, "check"):
            self.inner.check()
        ids, lens = self._num_invalid.taken()
        if ids or lens:
            told = f"{ids} proposed ids are outside the vocabulary of {self.vocab_size}"
            if not ids:
                told = f"{lens} of the lens that propose returned are outside 0..caps"
            raise UsageError(f"{self.who}: {told}")


class PluggedRule(AcceptanceRule):
    """An acceptance rule that wraps `inner`, which must have `decide` and may have other members of
    `acceptance.base.AcceptanceRule`. Without `is_lossless` it counts as lossy, and all its results
    are labelled as lossy.
    """

    def __init__(self, name: str, inner: Any) -> None:
        self.who = f"acceptance {name}"
        self.inner = inner
        self.is_lossless: bool = getattr(inner, "is_lossless", False)
        self.looks_ahead: bool = getattr(inner, "looks_ahead", False)
        self.draws_when_greedy: bool = getattr(inner, "draws_when_greedy", not self.is_lossless)
        self.keeps_greedy = self.is_lossless
        self.remark: str | None = getattr(inner, "remark", None)
        if not (self.is_lossless or self.remark):
            self.remark = "the text may not follow the target's distribution"
        # Values of `num_accepted` above the number of proposals, or below all that have a meaning.
        self._num_invalid = DeviceCounts(1)

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        with blamed(self.who, "decide"):
            found = self.inner.decide(candidates, target, params, noise)
        if not isinstance(found, Verdict):
            raise UsageError(f"{self.who}: decide should return a Verdict, not {found!r:.60}")
        batch, k = candidates.token_ids.shape
        expect(self.who, "token_ids", found.token_ids, (batch, k + 1), torch.int64)
        expect(self.who, "num_accepted", found.num_accepted, (batch,), torch.int64)
        accepted = torch.minimum(found.num_accepted, candidates.lens)
        accepted = torch.where(accepted < _LEAST_ACCEPTED, 0, accepted)
        # Slots without a sequence have no proposals, and their decisions are never used.
        is_invalid = (accepted != found.num_accepted) & (candidates.lens > 0)
        self._num_invalid.add(is_invalid.sum()[None])
        return Verdict(found.token_ids, accepted)

    def check(self) -> None:
        """Raise `UsageError` if the plugin has accepted more than was proposed since the last
        call."""
        (count,) = self._num_invalid.taken()
        if count:
            raise UsageError(
                f"{self.who}: {count} of the num_accepted that decide returned are outside 0..lens"
            )

    def forecast(
        self, index: int, start: int, count: int, k: int, params: SamplingParams
    ) -> Forecast | None:
        raise NoForecast


class PluggedPolicy:
    """A length policy that wraps `inner`, which may have any member of
    `lengths.base.LengthPolicy`."""

    is_fixed = False

    def __init__(self, name: str, inner: Any) -> None:
        self.who = f"length policy {name}"
        self.inner = inner
        self.stop: Stop | None = self._checked("stop")
        self.doubt: Doubt | None = self._checked("doubt")

    def _checked(self, name: str) -> Callable[..., torch.Tensor] | None:
        """Return the plugin's own function of this name, or None if it has none. Its errors name
        the plugin, and its result must be bool [R] for R tokens or scores."""
        own = getattr(self.inner, name, None)
        if own is None:
            return None

        def call(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            with blamed(self.who, name):
                found: torch.Tensor = own(first, *others)
            expect(self.who, name, found, (len(first),), torch.bool)
            return found

        return call

    def lengths(self, k: int) -> tuple[int, ...]:
        if not hasattr(self.inner, "lengths"):
            return (k,)
        with blamed(self.who, "lengths"):
            found = tuple(sorted(set(self.inner.lengths(k))))
        if not found or not all(type(n) is int and 0 <= n <= k for n in found):
            raise UsageError(
                f"{self.who}: lengths should be integers in 0..{k}, but are {list(found)}"
            )
        return found

    def next_k(
        self, lengths: tuple[int, ...], last: LastRounds, costs: RoundCosts, slots: int
    ) -> int:
        with blamed(self.who, "next_k"):
            found: int = self.inner.next_k(lengths, last, costs, slots)
        if found not in lengths:
            raise UsageError(
                f"{self.who}: next_k should be one of {list(lengths)}, but is {found!r}"
            )
        return found

    def caps(self, state: BatchState, caps: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.inner, "caps"):
            return caps
        with blamed(self.who, "caps"):
            found: torch.Tensor = self.inner.caps(state, caps)
        expect(self.who, "caps", found, tuple(caps.shape), caps.dtype)
        return torch.minimum(found.clamp(min=0), caps)
