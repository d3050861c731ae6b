"""The interface of dialects, with the types and helpers that they share. A dialect knows the format
of the requests and answers of one kind of server.

A dialect only converts data; it does no input or output.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from specdec_cli.core.types import FinishReason, Request, SamplingParams
from specdec_cli.errors import UsageError
from specdec_cli.text import inert

Kind = Literal["vllm", "sglang", "openai"]
_MOST_WORDS = 300


class Broken(Exception):
    """A failure that may be temporary, so the request is worth another attempt. wait_s: how long
    the server asks to wait before the next attempt, in seconds."""

    def __init__(self, told: str, wait_s: float = 0.0) -> None:
        super().__init__(told)
        self.wait_s = wait_s


class Refused(Exception):
    """A failure that would occur again at every attempt."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that a server reports about itself.

    k: the proposal length; None if the server does not report it.
    model: the model's name in requests.
    is_tree: whether SGLang proposes a tree of tokens instead of a chain.
    incremental: whether SGLang's chunks hold only new tokens, not all tokens so far.
    """

    url: str
    kind: Kind
    version: str | None
    k: int | None
    method: str | None
    model: str
    max_model_len: int | None = None
    is_tree: bool = False
    incremental: bool = False


@dataclass(frozen=True, slots=True)
class Details:
    """A server's report on the rounds of one request, as received and not checked.

    histogram: entry i is the number of rounds that accepted i proposals.
    accepted: how many tokens each round accepted, in order; None if the server does not report it.
    proposed: how many tokens each round proposed, in order; None if the server does not report it.
    """

    num_rounds: int
    num_accepted: int
    histogram: tuple[int, ...]
    num_proposed: int | None = None
    accepted: tuple[int, ...] | None = None
    proposed: tuple[int, ...] | None = None


@dataclass(slots=True)
class Reading:
    """The part of an answer that has been read so far.

    usage: the number of output tokens according to the server.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    prompt_token_ids: list[int] | None = None
    num_prompt_tokens: int | None = None
    usage: int | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    details: Details | None = None


class Dialect(Protocol):
    """The format of requests and answers of one kind of server. counts: whether these servers have
    counters of proposed and accepted tokens."""

    kind: Kind
    counts: bool

    def body(
        self, facts: ServerFacts, request: Request, params: SamplingParams, salt: str
    ) -> tuple[str, dict[str, Any]]:
        """Return the URL path and the JSON body of a request. salt: a random string that keeps the
        server from reusing cached prefixes of other requests."""
        ...

    def read(self, facts: ServerFacts, event: Mapping[str, Any], reading: Reading) -> None:
        """Add one event of the stream to `reading`. Raises `Broken` if the event reports a
        failure."""
        ...


def common_body(params: SamplingParams, *, off: int) -> dict[str, Any]:
    """Return all sampling fields of a request. Every field is sent, since servers take missing ones
    from the model's generation_config.json. off: the value of top_k that disables top-k sampling
    on this server."""
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
    """Return the seed for a prompt. It is the same at every k."""
    return (params.seed + request.index) % 2**31


def is_count(found: object) -> bool:
    """Return True for a number that can be a count: a whole number from 0, in 32 bits."""
    return type(found) is int and 0 <= found < 2**31


def listed(found: object) -> tuple[Any, ...]:
    """Return the values of `found` as a tuple if it is a list; otherwise ()."""
    return tuple(found) if isinstance(found, list) else ()


def key() -> str:
    """Return the API key from OPENAI_API_KEY; empty if unset. White space around it is removed,
    since a key that was read from a file often ends in a line break. Raises `UsageError` for an
    unprintable character inside, which no HTTP header can hold."""
    found = os.environ.get("OPENAI_API_KEY", "").strip()
    if not found.isprintable():
        raise UsageError(
            "OPENAI_API_KEY: the key has a line break or another unprintable character inside",
            "set it to the key alone",
        )
    return found


def without_key(words: str) -> str:
    """Replace the API key in a server's message, since servers may quote it."""
    return words.replace(own, "***") if (own := key()) else words


def words_of(found: object) -> str:
    """Return a server's error message in one line, without the API key. `found` may have any of the
    forms that servers use."""
    while isinstance(found, Mapping):
        inner = (found.get(name) for name in ("error", "message", "detail", "object"))
        found = next((one for one in inner if one), "an error without a message")
    return inert(without_key(" ".join(str(found).split())))[:_MOST_WORDS]


def refuse_error(event: Mapping[str, Any]) -> None:
    """Raise `Broken` if an event reports an error. Servers can do so after HTTP status 200."""
    if event.get("error") or event.get("object") == "error":
        raise Broken(f"the server reported an error: {words_of(event)}")
