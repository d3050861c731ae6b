"""Wrappers that let a plugin's proposer, rule or policy take the place of a built-in one.

They add defaults and checks, so a plugin's class may define as little as one method. A mistake in
it ends the run with a one-line error that names the plugin.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specdec_cli.acceptance.base import AcceptanceRule, NoForecast
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, TokenDist, Verdict
from specdec_cli.core.drafting import Doubt, Drafting, Stop
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.sampling import softmax_stats
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.errors import ExitCode, SpecdecError, UsageError
from specdec_cli.lengths.base import LastRounds
from specdec_cli.lengths.costs import RoundCosts
from specdec_cli.methods.base import MethodParts, Proposer
from specdec_cli.methods.teacher import Teacher
from specdec_cli.text import counted

# The least value of each attribute, or method's result, that has to be an integer.
_LEAST = {"tail": 1, "tail_for": 1, "max_len": 0, "max_lag": 0, "ahead": 0, "kv_after": 0}
_COPY = "change a copy: tensor.clone()"


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
    except (Exception, SystemExit) as problem:
        if isinstance(problem, SystemExit) and problem.code == ExitCode.SIGTERM:  # a signal's
            raise
        told = " ".join(f"{type(problem).__name__}: {problem}".split()).removesuffix(":")
        hint = f"{about_none}; " if about_none and "NoneType" in told else ""
        raise UsageError(f"{who}: {doing} raised {told}", f"{hint}-v shows where") from problem


def built(made: type[Any], given: object) -> Any:
    """Make an object of a plugin's class, and pass `given` to its constructor. A class that defines
    no constructor is called without arguments."""
    return made() if _constructor(made) is object.__init__ else made(given)


def _constructor(made: type[Any]) -> Any:
    """Return the constructor of a class. Skip those that `typing` adds to protocols such as
    `AcceptanceRule`, because they only call the next one."""
    own = (vars(base)["__init__"] for base in made.__mro__ if "__init__" in vars(base))
    return next(one for one in own if getattr(one, "__module__", None) != "typing")


class DeviceCounts:
    """Counts of invalid results, kept on the device so that no round waits for them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: torch.Tensor | None = None  # int64 [size]

    def add(self, counts: torch.Tensor) -> None:
        """Add `counts`, int64 [size]."""
        if self._counts is None or self._counts.device != counts.device:
            self._counts = torch.zeros_like(counts)
        self._counts += counts

    def taken(self) -> list[int]:
        """Return the counts since the last call, and set them to 0. This waits for the device."""
        if self._counts is None:
            return [0] * self._size
        found: list[int] = self._counts.tolist()
        with torch.inference_mode():
            self._counts.zero_()  # in place, because captured rounds add to this tensor
        return found


class Lent:
    """Tensors that a plugin is given and must not write to.

    Those of one dtype are copied and compared together, because a round measures the time of each
    operation here as time of the plugin.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        self._groups = [[one for one in tensors if one.dtype == dtype] for dtype in dtypes]
        self._before = self._values()

    def _values(self) -> list[torch.Tensor]:
        return [torch.cat([one.reshape(-1) for one in group]) for group in self._groups]

    def restored(self) -> torch.Tensor:
        """Write the tensors' first values back, and return a bool scalar: whether any of them had
        changed."""
        pairs = list(zip(self._values(), self._before, strict=True))
        if not pairs[0][0].is_cuda and all(torch.equal(*pair) for pair in pairs):
            return torch.zeros((), dtype=torch.bool)  # on a CPU the host need not wait to know
        for group, values in zip(self._groups, self._before, strict=True):
            pieces = values.split([one.numel() for one in group])
            for tensor, piece in zip(group, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
        return torch.stack([(after != before).any() for after, before in pairs]).any()


def flag(who: str, name: str, value: object) -> bool:
    """Return `value`. Raise `UsageError` unless it is True or False: text such as "no" would count
    as True."""
    if not isinstance(value, bool):
        raise UsageError(f"{who}: {name} should be True or False, but is {value!r:.60}")
    return value


def expect(
    who: str,
    name: str,
    found: object,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise `UsageError` unless `found` is a tensor of this shape and dtype on this device."""
    if isinstance(found, torch.Tensor):
        if (found.shape, found.dtype, found.device) == (shape, dtype, device):
            return
        elsewhere = f" on {found.device}" if found.device != device else ""
        told = f"{list(found.shape)} {_word(found.dtype)}{elsewhere}"
    else:
        told = type(found).__name__
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
        # Token ids outside the vocabulary, lengths (`Candidates.lens`) outside 0..caps, and rounds
        # in which `propose` or `commit` wrote to what it was given.
        self._num_invalid = DeviceCounts(4)
        with blamed(self.who, "making it"):
            self.inner = built(type(made.__name__, (made, Proposer), {}), parts)
            self.feature_layers = tuple(self.inner.feature_layers)
            self._check_members()
        if self.feature_layers:
            last = parts.target.module.config.num_hidden_layers
            if not all(type(one) is int and 0 <= one <= last for one in self.feature_layers):
                told = f"integers in 0..{last}, but are {list(self.feature_layers)}"
                raise UsageError(f"{self.who}: feature_layers should be {told}")

    def __getattr__(self, name: str) -> Any:
        """Return the plugin's own attribute of this name. Methods are wrapped, so that the messages
        of their errors name the plugin, and run in inference mode, as rounds do."""
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            with blamed(self.who, name), torch.inference_mode():
                result = found(*args)
            return self._checked(name, result)

        return call

    def _checked(self, name: str, value: Any) -> Any:
        """Return `value`. Raise `UsageError` if it has to be an integer and is none."""
        if (least := _LEAST.get(name)) is not None and (type(value) is not int or value < least):
            raise UsageError(
                f"{self.who}: {name} should be an integer of at least {least}, but is {value!r:.60}"
            )
        return value

    def _check_members(self) -> None:
        """Raise `UsageError` unless the inner proposer's sizes are integers in their ranges, and
        its flags are True or False."""
        for name in ("tail", "max_len", "max_lag"):
            self._checked(name, getattr(self.inner, name))
        for name in ("needs_text", "is_paged", "depends_on_k"):
            flag(self.who, name, getattr(self.inner, name))

    def up_to(self, k: int) -> "PluggedMethod":
        """Return this wrapper around the plugin's own proposer for k."""
        with blamed(self.who, "up_to"), torch.inference_mode():
            inner = self.inner.up_to(k)
        if inner is self.inner:
            return self
        if not isinstance(inner, Proposer):
            told = f"up_to should return self or a copy of it, not {inner!r:.60}"
            raise UsageError(f"{self.who}: {told}")
        found = object.__new__(PluggedMethod)
        vars(found).update(vars(self) | {"inner": inner})
        found._check_members()
        return found

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose tokens. An invalid id ends its sequence's proposals, and `check` reports it."""
        hint = "" if self.inner.needs_text else "state.texts is None without needs_text = True"
        lent = Lent(*state.tensors, draft.caps)
        with blamed(self.who, "propose", hint):
            found = self.inner.propose(state, draft)
        if not isinstance(found, Candidates):
            raise UsageError(f"{self.who}: propose should return Candidates, not {found!r:.60}")
        (batch,), k, device = draft.caps.shape, draft.k, draft.caps.device
        expect(self.who, "token_ids", found.token_ids, (batch, k), torch.int64, device)
        expect(self.who, "lens", found.lens, (batch,), torch.int64, device)
        self._check_dist(found.q, (batch, k), device)
        written = lent.restored()
        lens = torch.minimum(found.lens.clamp(min=0), draft.caps)
        ids, q = found.token_ids, _with_stats(found.q, draft)
        # The id -1 marks a token that was drawn from logits that are not finite, and verification
        # reports it.
        clamped = ids.clamp(-1 if draft.num_drawn else 0, self.vocab_size - 1)
        if not lens.is_cuda and torch.equal(clamped, ids) and torch.equal(lens, found.lens):
            if not written:
                return Candidates(ids, lens, q)
        place = torch.arange(k, device=device)
        invalid = (clamped != ids) & (place < lens[:, None])
        outside = (found.lens != lens) & state.active
        is_used = state.active.any()
        counts = invalid.sum() * is_used, outside.sum(), (written & is_used).long()
        self._num_invalid.add(torch.stack([*counts, torch.zeros_like(counts[0])]))
        first = torch.where(invalid, place, k).amin(dim=1)
        return Candidates(clamped, torch.minimum(lens, first), q)

    def forecast(self, teacher: Teacher, text: Sequence, params: SamplingParams) -> Forecast | None:
        """Return the plugin's own forecast. One that it inherits from a method whose rounds it
        changes is of other rounds, so the result is None, as without a forecast."""
        classes = type(self.inner).__mro__
        rounds = [_place(classes, name) for name in ("propose", "prefill", "commit")]
        if _place(classes, "forecast") > min(rounds):
            return None
        with blamed(self.who, "forecast"), torch.inference_mode():
            found: Forecast | None = self.inner.forecast(teacher, text, params)
        return found

    def commit(self, state: BatchState, verdict: Verdict, target: TargetOutput) -> None:
        lent = Lent(*state.tensors, verdict.token_ids, verdict.num_accepted)
        with blamed(self.who, "commit"), torch.inference_mode():
            self.inner.commit(state, verdict, target)
        written = (lent.restored() & state.active.any()).long()
        none = torch.zeros_like(written)
        self._num_invalid.add(torch.stack([none, none, none, written]))

    def _check_dist(self, q: object, shape: tuple[int, int], device: torch.device) -> None:
        """Raise `UsageError` unless `q` is None or fits proposals of this shape."""
        if q is None:
            return
        if not isinstance(q, TokenDist):
            told = f"q should be a TokenDist, but is {type(q).__name__}"
            raise UsageError(f"{self.who}: {told}", "draft.candidates() makes one")
        width = q.logits.shape[-1] if isinstance(q.logits, torch.Tensor) and q.logits.dim() else 0
        dtype = q.logits.dtype if width and q.logits.is_floating_point() else torch.float32
        width = min(width, self.vocab_size)
        expect(self.who, "q.logits", q.logits, (*shape, width), dtype, device)
        if q.stats is not None:
            expect(self.who, "q.stats", q.stats, (*shape, 4), torch.float32, device)

    def check(self) -> None:
        """Raise `UsageError` if the plugin has proposed ids outside the vocabulary, returned `lens`
        outside 0..caps, or written to what it was given, since the last call."""
        with blamed(self.who, "check"):
            self.inner.check()
        ids, lens, written, committed = self._num_invalid.taken()
        if written:
            told = f"propose changed tensors of state, or draft.caps, in {written} rounds"
            raise UsageError(f"{self.who}: {told}", _COPY)
        if committed:
            told = f"commit changed tensors of state, or of the verdict, in {committed} rounds"
            raise UsageError(f"{self.who}: {told}", _COPY)
        if ids or lens:
            told = f"{ids} proposed ids are outside the vocabulary of {self.vocab_size}"
            if not ids:
                told = f"{lens} of the lens that propose returned are outside 0..caps"
            raise UsageError(f"{self.who}: {told}")


def _place(classes: tuple[type[Any], ...], name: str) -> int:
    """Return the index of the class that defines a member."""
    return next(place for place, one in enumerate(classes) if name in vars(one))


def _with_stats(q: TokenDist | None, draft: Drafting) -> TokenDist | None:
    """Add the statistics that verification on CUDA needs, if a plugin has left them out. Without
    them it would take each proposal for certain."""
    if q is None or q.stats is not None or draft.params.is_greedy:
        return q
    logits = q.logits.contiguous()
    stats = softmax_stats(logits.flatten(0, 1), draft.params)
    return TokenDist(logits, None if stats is None else stats.rows.unflatten(0, logits.shape[:2]))


class PluggedRule(AcceptanceRule):
    """An acceptance rule that wraps `inner`, which must have `decide` and may have other members of
    `acceptance.base.AcceptanceRule`. Without `is_lossless` it counts as lossy, and all its results
    are labelled as lossy.
    """

    def __init__(self, name: str, inner: Any) -> None:
        self.who = f"acceptance {name}"
        self.inner = inner
        self.is_lossless = self._flag("is_lossless", False)
        self.looks_ahead = self._flag("looks_ahead", False)
        self.draws_when_greedy = self._flag("draws_when_greedy", not self.is_lossless)
        self.keeps_greedy = self.is_lossless
        self.remark: str | None = getattr(inner, "remark", None)
        if not (self.is_lossless or self.remark):
            self.remark = "the text may not follow the target's distribution"
        # Values of `num_accepted` outside 0..lens, token ids outside the vocabulary, and rounds in
        # which `decide` wrote to what it was given.
        self._num_invalid = DeviceCounts(3)

    def _flag(self, name: str, default: bool) -> bool:
        return flag(self.who, name, getattr(self.inner, name, default))

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        is_used = (candidates.lens > 0).any()
        lent = Lent(candidates.token_ids, candidates.lens)
        hint = "noise is None in greedy decoding without draws_when_greedy = True"
        with blamed(self.who, "decide", hint if noise is None else ""):
            found = self.inner.decide(candidates, target, params, noise)
        if not isinstance(found, Verdict):
            raise UsageError(f"{self.who}: decide should return a Verdict, not {found!r:.60}")
        (batch, k), device = candidates.token_ids.shape, candidates.lens.device
        vocab, lens, told = target.logits.shape[-1], candidates.lens, found.num_accepted
        expect(self.who, "token_ids", found.token_ids, (batch, k + 1), torch.int64, device)
        expect(self.who, "num_accepted", told, (batch,), torch.int64, device)
        written = lent.restored() & is_used
        place = torch.arange(k + 1, device=device)
        # -1 and -2 are valid only where the target's or the draft's logits are really not finite.
        unknown = ~target.logits.amax(dim=-1).isfinite() & (place <= lens[:, None])
        of_target, of_draft = unknown.any(dim=1), (candidates.token_ids < 0).any(dim=1)
        is_mark = ((told == -1) & of_target) | ((told == -2) & of_draft)
        accepted = torch.where(is_mark, told, torch.minimum(told.clamp(min=0), lens))
        # Slots without a sequence have no proposals, and their decisions are never used.
        is_invalid = (accepted != told) & (lens > 0)
        ids = found.token_ids.clamp(0, vocab - 1)
        is_outside = (ids != found.token_ids) & (place <= accepted[:, None]) & (lens > 0)[:, None]
        # A token that was drawn from logits that are not finite is -1.
        accepted = torch.where(is_outside.any(dim=1) & of_target, -1, accepted)
        counts = is_invalid.sum(), (is_outside & ~of_target[:, None]).sum(), written.long()
        self._num_invalid.add(torch.stack(counts))
        return Verdict(ids, accepted)

    def check(self) -> None:
        """Raise `UsageError` if the plugin has accepted more than was proposed, written ids outside
        the vocabulary, or written to the proposals, since the last call."""
        accepted, ids, written = self._num_invalid.taken()
        if written:
            told = f"decide changed tensors of candidates in {written} rounds"
            raise UsageError(f"{self.who}: {told}", _COPY)
        if accepted or ids:
            told = f"{counted(accepted, 'value')} of num_accepted outside 0..lens"
            if ids:
                told = f"{counted(ids, 'token id')} outside the vocabulary"
            raise UsageError(f"{self.who}: decide returned {told}")

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
        self._num_written = DeviceCounts(1)  # rounds in which `caps` wrote to the state

    def _checked(self, name: str) -> Callable[..., torch.Tensor] | None:
        """Return the plugin's own function of this name, or None if it has none. Its errors name
        the plugin, and its result must be bool [R] for R tokens or scores."""
        own = getattr(self.inner, name, None)
        if own is None:
            return None

        def call(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            with blamed(self.who, name):
                found: torch.Tensor = own(first, *others)
            expect(self.who, name, found, (len(first),), torch.bool, first.device)
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
        if type(found) is not int or found not in lengths:
            raise UsageError(
                f"{self.who}: next_k should be one of {list(lengths)}, but is {found!r:.60}"
            )
        return found

    def caps(self, state: BatchState, caps: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.inner, "caps"):
            return caps
        lent = Lent(*state.tensors)
        with blamed(self.who, "caps"):
            found: torch.Tensor = self.inner.caps(state, caps.clone())
        self._num_written.add((lent.restored() & state.active.any()).long()[None])
        expect(self.who, "caps", found, tuple(caps.shape), caps.dtype, caps.device)
        return torch.minimum(found.clamp(min=0), caps)

    def check(self) -> None:
        """Raise `UsageError` if the plugin has written to the state since the last call."""
        (written,) = self._num_written.taken()
        if written:
            told = f"caps changed tensors of state in {written} rounds"
            raise UsageError(f"{self.who}: {told}", _COPY)
