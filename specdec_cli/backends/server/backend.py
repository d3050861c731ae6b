"""The backend for inference servers. It loads no model weights: of the recipe's models, it reads
only the target's tokenizer and configuration files.

Tokenizer libraries are slow to import, so they are imported inside the functions that use them.
"""

import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdec_cli import __version__
from specdec_cli.backends.base import Prepared, Session
from specdec_cli.backends.server import times
from specdec_cli.backends.server.client import Limits
from specdec_cli.backends.server.detect import KeyWantedError, look_at
from specdec_cli.backends.server.dialects import ServerFacts
from specdec_cli.backends.server.flags import command_of, model_words, rule_of
from specdec_cli.backends.server.process import HOST, NotUpError, Process, free_port
from specdec_cli.backends.server.session import Line, ServerSession
from specdec_cli.core.types import Permissions
from specdec_cli.errors import Notice, RunError, SetupError, UsageError
from specdec_cli.recipe import Recipe
from specdec_cli.recipe.choices.base import MethodChoice
from specdec_cli.recipe.choices.registry import METHODS, is_given
from specdec_cli.text import one_line

_UNLIMITED = 1 << 31
_AS_STARTED = (
    "a running server accepts as it was started, whatever the recipe says, so this is true only if "
    "it was started with the same rates"
)
_SAY_S = 30.0  # seconds between progress lines while a server starts


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The device of a run whose computation happens on a server."""

    type: str = "elsewhere"


class ServerBackend:
    """A backend that uses a different server for each k. The servers may be running already, or
    this class starts them, one at a time. Use it as a context manager: on exit, the backend stops
    the server that it started last.

    servers: the servers that answer requests, by k.
    logs: the folder for the logs of started servers.
    started: the facts that the started servers reported.
    notices: warnings about the started servers.
    """

    is_native = False

    def __init__(self) -> None:
        self._line = Line()
        self.servers: dict[int, ServerFacts] = {}
        self.logs = Path()
        self.started: list[ServerFacts] = []
        self.notices: list[Notice] = []
        self._permissions = Permissions()
        self._batch_size = 0  # the largest of the run
        self._process: Process | None = None
        self._unknown: list[str] = []  # flags unknown to this version of the server

    @property
    def holds_caches(self) -> bool:
        return not self.servers or bool(self.started)

    def __enter__(self) -> "ServerBackend":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self._line.close()

    def look(self, url: str, recipe: Recipe) -> ServerFacts:
        """Find out which server answers at `url`; see `look_at`."""
        engine = recipe.engine
        return self._line.run(
            lambda http: look_at(http, url, engine.served_model, engine.start_timeout_s)
        )

    def start(self, plan: Prepared, k: int, told: Callable[[str], None]) -> None:
        """Start a server for `k`, and wait until it is healthy. Any server that this class started
        earlier must have been stopped.

        told: called with each progress message.
        """
        recipe, engine = plan.recipe, plan.recipe.engine
        command = command_of(engine.kind, recipe, k, self._permissions, self._batch_size)
        command = command.without(self._unknown) or command
        name = f"{engine.kind}-{plan.proposer}-k{k}" if k else f"{engine.kind}-k0"
        log = self.logs / f"{re.sub('[^A-Za-z0-9.-]+', '_', name)}.log"
        self.logs.mkdir(parents=True, exist_ok=True)
        while True:
            port = free_port()
            words = command.words(model_words(recipe.target), HOST, port, k)
            told(f"starting {name}")
            self._process = process = Process(words, command.env, log, engine.stop_timeout_s)
            try:
                facts = self._up(f"http://{HOST}:{port}", recipe, process, name, told)
                break
            except RunError:
                ours = {flag[0] for flag in command.flags}
                unknown = [one for one in process.unknown_flags if one in ours]
                less = command.without(unknown)
                self.stop()
                if less is None:
                    raise
                command = less
                self._unknown += unknown
                left = f"{name} was started again without {', '.join(unknown)}: it has no such flag"
                told(left)
                self.notices.append(Notice("flags_left_out", left, {"flags": unknown}))
        if facts.k not in (None, k):
            raise RunError(f"{name} reports k = {facts.k}, not {k}")
        self.servers = {k: replace(facts, k=k)}
        self.started.append(replace(facts, k=k))

    def _up(
        self, url: str, recipe: Recipe, process: Process, name: str, told: Callable[[str], None]
    ) -> ServerFacts:
        engine, began = recipe.engine, time.monotonic()
        said = 0
        while True:
            process.check()
            try:
                facts = self._line.run(lambda http: look_at(http, url, engine.served_model, 0.0))
                told(f"{name} is up after {time.monotonic() - began:.0f} s")
                return facts
            except KeyWantedError:
                raise
            except SetupError as problem:
                waited = time.monotonic() - began
                if waited > engine.start_timeout_s:
                    raise NotUpError(
                        f"{name} is not healthy after {engine.start_timeout_s:g} s "
                        f"(engine.start_timeout_s): {problem.message}; {process.last_words}"
                    ) from None
                if waited > (said + 1) * _SAY_S:
                    said += 1
                    told(f"{name} has been starting for {waited:.0f} s")
            time.sleep(times.LOOK_S)

    def stop(self) -> None:
        process, self._process = self._process, None
        self.servers = {}
        if process is not None:
            process.stop()

    def _check(self, within_s: float) -> None:
        if self._process is not None:
            self._process.check(within_s)

    def prepare(
        self, recipe: Recipe, permissions: Permissions, largest: tuple[int, int] | None = None
    ) -> Prepared:
        from specdec_cli.models.config_file import config_file
        from specdec_cli.models.generation_config import generation_config, with_sampling
        from specdec_cli.models.resolve import model_place
        from specdec_cli.models.tokenizer import load_tokenizer

        recipe, target = with_sampling(recipe), recipe.target
        for facts in self.servers.values():
            _refuse_unsent(recipe, facts.kind, f"the server at {facts.url} ({facts.kind})")
            _refuse_other_method(recipe, facts)
        place = model_place(target.model, target.revision, target.file, weights=False)
        config: Mapping[str, Any] = config_file(target.model, place)
        inner = config.get("text_config")
        inner = inner if isinstance(inner, Mapping) else config
        vocabulary = config.get("vocab_size") or inner.get("vocab_size") or _UNLIMITED
        own = inner.get("max_position_embeddings") or _UNLIMITED
        told = [f.max_model_len for f in self.servers.values() if f.max_model_len is not None]
        kinds: set[str] = {facts.kind for facts in self.servers.values()}
        serves, dtype, random = recipe.engine.kind != "native" and not self.servers, "unknown", []
        if serves:
            kind, self._permissions = recipe.engine.kind, permissions
            k, self._batch_size = largest or (0, recipe.run.batch_size)
            kinds = {kind}
            _refuse_unsent(recipe, kind, kind)
            command_of(kind, recipe, k, permissions, self._batch_size)
            dtype = "unknown" if target.dtype == "auto" else target.dtype
            roles = {"target": target, "draft": recipe.draft}
            random = [n for n, m in roles.items() if m is not None and m.load_format == "dummy"]
        is_said = any(self.servers) and is_given(recipe.speculation.acceptance)
        return Prepared(
            recipe=recipe,
            k=max(self.servers, default=largest[0] if largest else 0),
            proposer=self._proposer(recipe),
            tokenizer=load_tokenizer(
                *(place, target.model, vocabulary, target.load_format == "dummy"),
                permissions.trust_remote_code,
            ),
            vocab_size=vocabulary,
            max_model_len=min(recipe.cache.max_model_len or _UNLIMITED, *(told or [own])),
            generation_config=generation_config(place),
            device=Elsewhere(),
            device_name=f"server ({', '.join(sorted(kinds))})",
            dtype_name=dtype,
            random_roles=frozenset(random),
            remark=_AS_STARTED if is_said else None,
        )

    def _proposer(self, recipe: Recipe) -> str | None:
        """Return a name for the source of the proposals. This is the recipe's own. Otherwise it is
        the method that a server reports, "server" if servers propose tokens but report no method,
        or None if no server proposes tokens."""
        if recipe.proposer is not None:
            return recipe.proposer
        told = (facts.method for k, facts in self.servers.items() if k)
        return next((name for name in told if name), "server" if any(self.servers) else None)

    def open_session(
        self,
        plan: Prepared,
        longest_prompt: int,
        on_stage: Callable[[str], None],
        weights: object = None,
    ) -> ServerSession:
        recipe = plan.recipe
        return ServerSession(
            servers=self.servers,
            batch_size=recipe.run.batch_size,
            max_model_len=plan.max_model_len,
            vocab_size=plan.vocab_size,
            limits=Limits(recipe.engine.request_timeout_s, recipe.engine.retries),
            may_skip=frozenset(k for k, facts in self.servers.items() if _may_skip(recipe, facts)),
            line=self._line,
            check=self._check,
        )

    def open_beside(
        self,
        plan: Prepared,
        longest_prompt: int,
        session: Session,
        on_stage: Callable[[str], None],
    ) -> Session | None:
        raise UsageError("--draft: with --server, only the server's own draft can be used")

    def environment(self, plan: Prepared) -> dict[str, Any]:
        return {
            "specdec": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": plan.device_name,
            "dtype": plan.dtype_name,
            "servers": [asdict(facts) for facts in self.started or self.servers.values()],
        }

    def peak_memory(self, plan: Prepared) -> int:
        return 0

    def free_memory(self, plan: Prepared) -> None:
        """Do nothing, because only the server holds memory."""


def _refuse_other_method(recipe: Recipe, facts: ServerFacts) -> None:
    """Raise `UsageError` if an SGLang server reports another method than the recipe's. Its points
    would have the name of a draft that the server does not run."""
    method = recipe.speculation.method
    ours, reported = _sglang_name(METHODS[method]), _reported(facts)
    if facts.k and None not in (ours, reported) and ours != reported:
        raise UsageError(
            f"the server at {facts.url} runs {facts.method}, but the recipe's method {method} is "
            f"SGLang's {ours}",
            "name what the server runs, with --draft or --method",
        )


def _may_skip(recipe: Recipe, facts: ServerFacts) -> bool:
    """Return True if the server's method may propose nothing in a round. Methods without weights
    may, because they look up earlier text. If the server reports no method that is known, the
    recipe's counts."""
    reported, choices = _reported(facts), METHODS.values()
    known = (choice for choice in choices if reported and _sglang_name(choice) == reported)
    return next(known, METHODS[recipe.speculation.method]).weights_from == "none"


def _sglang_name(choice: MethodChoice) -> str | None:
    """Return SGLang's name for a method; None if it has no such method."""
    return None if choice.to_sglang is None else str(choice.to_sglang(1)["algorithm"])


def _reported(facts: ServerFacts) -> str | None:
    """Return the method that an SGLang server reports, in the form of `_sglang_name`; None if a
    server reports none."""
    if facts.kind != "sglang" or facts.method is None:
        return None
    name = facts.method.upper()
    return "NEXTN" if name == "EAGLE" else name  # SGLang has two names for it


def _refuse_unsent(recipe: Recipe, kind: str, server: str) -> None:
    """Raise `UsageError` if the recipe sets a sampling option, a length policy, an acceptance rule
    or something of a plugin that servers of this kind do not support.

    server: the name of the server for error messages.
    """
    if (policy := recipe.speculation.length.policy) != "fixed":
        raise UsageError(
            f"speculation.length.policy: {server} has no policy {policy}",
            "leave speculation.length out: each server proposes its own k",
        )
    speculation = recipe.speculation
    if METHODS[speculation.method].code is not None:
        raise UsageError(
            f"speculation.method: {server} has no method {speculation.method}, which is a plugin's"
        )
    if speculation.options:
        raise UsageError(
            f"speculation.options.{one_line(min(speculation.options))}: {server} has no plugins",
            "leave speculation.options out",
        )
    if kind != "openai":
        rule_of(recipe, {"vllm": "vLLM", "sglang": "SGLang"}[kind])
    unsent = ["suppress_tokens"]
    if kind == "openai":
        unsent += ["top_k", "repetition_penalty", "min_new_tokens", "ignore_eos"]
    fields = type(recipe.sampling).model_fields
    for name in unsent:
        if getattr(recipe.sampling, name) != fields[name].default:
            raise UsageError(
                f"sampling.{name}: {server} does not accept it",
                f"leave sampling.{name} out",
            )
