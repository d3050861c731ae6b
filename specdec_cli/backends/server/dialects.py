"""The interface of dialects, the forms of servers' requests and answers, and kinds of failures.

A dialect does no input or output.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from specdec_cli.core.types import FinishReason, Request, SamplingParams
from specdec_cli.text import inert

Kind = Literal["vllm", "sglang", "openai"]
_MOST_WORDS = 300


class Broken(Exception):
    """A failure that another attempt may avoid. wait_s: the wait that the server asks for."""

    def __init__(self, told: str, wait_s: float = 0.0) -> None:
        super().__init__(told)
        self.wait_s = wait_s


class Refused(Exception):
    """A failure that would occur again at every attempt."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that a server reports about itself. k: the proposal length; None if the server does not
    report it. model: the name to ask for. incremental: whether chunks of SGLang hold only new
    tokens.
    """

    url: str
    kind: Kind
    version: str | None
    k: int | None
    method: str | None
    model: str
    max_model_len: int | None = None
    incremental: bool = False


@dataclass(frozen=True, slots=True)
class Details:
    """A server's report on the rounds of one request, unchecked.

    histogram: the number of rounds by accepted proposals. accepted, proposed: the numbers of tokens
    that each round accepted and proposed, in order; None if the server does not report them.
    """

    num_rounds: int
    num_accepted: int
    histogram: tuple[int, ...]
    num_proposed: int | None = None
    accepted: tuple[int, ...] | None = None
    proposed: tuple[int, ...] | None = None


@dataclass(slots=True)
class Reading:
    """The part of an answer read so far in one attempt. usage: the number of output tokens, as the
    server counts them."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    prompt_token_ids: list[int] | None = None
    num_prompt_tokens: int | None = None
    usage: int | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    details: Details | None = None


class Dialect(Protocol):
    """A kind of server. counts: whether the server's counters show acceptance."""

    kind: Kind
    counts: bool

    def body(
        self, facts: ServerFacts, request: Request, params: SamplingParams, salt: str
    ) -> tuple[str, dict[str, Any]]:
        """The path and the JSON of a request. salt: a text that keeps the request from sharing
        cached prefixes with others."""
        ...

    def read(self, facts: ServerFacts, event: Mapping[str, Any], reading: Reading) -> None:
        """Enter one event of the stream. Raises `Broken` for a failure that the event reports."""
        ...


def common_body(request: Request, params: SamplingParams, *, off: int) -> dict[str, Any]:
    """All sampling fields of a request: servers take missing ones from generation_config.json.

    off: the value of top-k that turns it off.
    """
    found: dict[str, Any] = {
        "temperature": params.temperature,
        "top_k": params.top_k or off,
        "top_p": params.top_p,
        "min_p": 0.0,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.ignore_eos,
    }
    return found | ({"stop": list(params.stop)} if params.stop else {})


def seed_of(request: Request, params: SamplingParams) -> int:
    """The seed of a prompt, which is the same at every k."""
    return (params.seed + request.index) % 2**31


def listed(found: object) -> tuple[Any, ...]:
    """The values of `found` if it is a list; otherwise ()."""
    return tuple(found) if isinstance(found, list) else ()


def key() -> str:
    """The key for servers, without the line end that a file may have added; empty without a key."""
    return os.environ.get("OPENAI_API_KEY", "").strip()


def without_key(words: str) -> str:
    """A server's words without the key, which the server may quote."""
    return words.replace(own, "***") if (own := key()) else words


def words_of(found: object) -> str:
    """The words of a server's error, in one line and without the key, from any of the forms that
    servers use."""
    while isinstance(found, Mapping):
        inner = (found.get(name) for name in ("error", "message", "detail", "object"))
        found = next((one for one in inner if one), "an error without a message")
    return inert(without_key(" ".join(str(found).split())))[:_MOST_WORDS]


def refuse_error(event: Mapping[str, Any]) -> None:
    """Raise `Broken` for an event that is an error inside an answer of status 200."""
    if event.get("error") or event.get("object") == "error":
        raise Broken(f"the server broke off: {words_of(event)}")
