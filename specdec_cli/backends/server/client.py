"""The HTTP client. It sends each request when it is due, or later if the limit on concurrent
requests has been reached, and reads the answers.

All requests of a run are timed on one clock. `dialects` defines the formats of requests and
answers.
"""

import asyncio
import json
import random
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from specdec_cli.backends.server import times
from specdec_cli.backends.server.dialects import (
    Broken,
    Dialect,
    Reading,
    Refused,
    ServerFacts,
    is_count,
    key,
    without_key,
    words_of,
)
from specdec_cli.core.types import Arrivals, Request, SamplingParams

_AGAIN = (429, 500, 502, 503, 504)
_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(slots=True)
class Answer:
    """The outcome of one request. All times are in seconds on one clock.

    due: when the request should be sent.
    sent: when the client was ready to send it, before any wait for the limit on concurrent
        requests; 0 if not recorded.
    began: when the last attempt started.
    chunks: the arrival time and the number of new tokens of each chunk that holds text or tokens.
    error: why the answer is not usable; None if it is usable.
    lost_tokens: the largest number of tokens that the server may have generated in failed attempts.
    """

    request: Request
    due: float
    sent: float = 0.0
    began: float = 0.0
    reading: Reading = field(default_factory=Reading)
    chunks: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None
    num_retries: int = 0
    lost_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of output tokens: the number of ids, or else the server's `usage`."""
        return len(self.reading.token_ids) or self.reading.usage or 0

    @property
    def tokens_in_first(self) -> int:
        """The number of tokens in the first chunk. If chunks hold only text, this is 1, or all
        tokens if there is no second chunk."""
        if len(self.chunks) < 2:
            return self.num_tokens
        return self.chunks[0][1] or 1

    @property
    def sizes(self) -> list[int]:
        """The number of tokens in each chunk after the first."""
        return [count for _, count in self.chunks[1:]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on each request.

    timeout_s: the time limit of one attempt, in seconds.
    retries: the largest number of further attempts after the first.
    """

    timeout_s: float
    retries: int


class Events:
    """A parser for one stream of server-sent events. The stream may be split into pieces anywhere.

    As the HTML standard says, comments and fields other than `data` are skipped, and the data lines
    of one event are joined.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Parse the next piece, and return the data of each event that it completes."""
        text = self._rest + piece
        # A carriage return at the end may be the first half of a line ending.
        held = b"\r" if text.endswith(b"\r") else b""
        *lines, rest = _LINE_END.split(text[: len(text) - len(held)])
        self._rest = rest + held
        found = []
        for line in lines:
            if line:
                field, _, value = line.partition(b":")
                if field == b"data":
                    self._data.append(value.removeprefix(b" "))
            elif self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found


def new_session() -> aiohttp.ClientSession:
    """Open an HTTP session without a limit on the number of connections. It sends the API key from
    the environment, if there is one."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
        headers={"Authorization": f"Bearer {own}"} if (own := key()) else None,
        timeout=aiohttp.ClientTimeout(total=None),
    )


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests to one server.

    context: the largest number of tokens of a prompt and its answer.
    vocab_size: the number of token ids of the recipe's target.
    most: the largest number of concurrent requests; None for no limit.
    """

    http: aiohttp.ClientSession
    dialect: Dialect
    facts: ServerFacts
    params: SamplingParams
    limits: Limits
    context: int
    vocab_size: int
    most: int | None

    async def ask_all(self, requests: Sequence[Request]) -> list[Answer]:
        """Send all requests, at most `most` at a time. Returns the outcomes in the order of the
        requests."""
        room = asyncio.Semaphore(self.most if self.most is not None else max(1, len(requests)))
        start = time.perf_counter()

        async def one(request: Request) -> Answer:
            answer = Answer(request, start + request.arrives_at)
            if (wait := answer.due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            async with room:
                await self._ask(answer)
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
        return [task.result() for task in tasks]

    async def ask_arrivals(self, arrivals: Arrivals) -> list[Answer]:
        """Send each request when it is due, at most `most` at a time, until `arrivals.is_over`.
        Then wait for the requests that were sent, since the server's counters include their
        tokens."""
        room = asyncio.Semaphore(self.most) if self.most is not None else None
        start, answers = time.perf_counter(), list[Answer]()

        async def ask(answer: Answer) -> None:
            answers.append(answer)
            await self._ask(answer)
            arrivals.answered(answer.request.index, has_failed=answer.error is not None)
            if arrivals.is_over:
                sender.cancel()

        async def one(answer: Answer) -> None:
            if room is None:
                return await ask(answer)
            async with room:
                if not arrivals.is_over:
                    await ask(answer)

        async def send(group: asyncio.TaskGroup) -> None:
            for request in arrivals:
                answer = Answer(request, start + request.arrives_at)
                if (wait := answer.due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                answer.sent = time.perf_counter()
                group.create_task(one(answer))
                # If requests are late, the loop does not sleep above. Yield here, so that the
                # answers to earlier requests are still read in time.
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            sender = group.create_task(send(group))
        return answers

    def most_new(self, request: Request) -> int:
        """Return the largest number of tokens of an answer. Servers refuse a request that could
        exceed the context."""
        return min(self.params.max_new_tokens, self.context - len(request.token_ids))

    async def _ask(self, answer: Answer) -> None:
        """Send the request. Retry it after temporary failures, at most `limits.retries` times, but
        not after a timeout or a refusal. Records the result or the error in `answer`."""
        limits, most_new = self.limits, self.params.max_new_tokens
        if self.most_new(answer.request) < 1:
            answer.began = time.perf_counter()
            answer.error = (
                f"the prompt has {len(answer.request.token_ids)} tokens, but the server's context "
                f"holds {self.context} with output"
            )
            return
        for attempt in range(limits.retries + 1):
            answer.reading, answer.chunks, answer.num_retries = Reading(), [], attempt
            answer.began = time.perf_counter()
            try:
                async with asyncio.timeout(limits.timeout_s):
                    await self._attempt(answer)
                answer.error = _changed_prompt(answer) or self._foreign_token(answer)
                if answer.error is not None:
                    answer.lost_tokens += most_new
                return
            except TimeoutError:
                answer.error = f"no answer within {limits.timeout_s:g} s (engine.request_timeout_s)"
            except Refused as refused:
                answer.error = str(refused)
            except (Broken, aiohttp.ClientError, OSError, ValueError) as problem:
                answer.error = without_key(str(problem) or type(problem).__name__)
                answer.lost_tokens += most_new
                if attempt < limits.retries:
                    backoff = times.RETRY_S * 2**attempt * random.uniform(0.75, 1.25)
                    asked = problem.wait_s if isinstance(problem, Broken) else 0.0
                    await asyncio.sleep(min(max(backoff, asked), limits.timeout_s))
                continue
            answer.lost_tokens += most_new
            return

    def _foreign_token(self, answer: Answer) -> str | None:
        """Return an error message if the server wrote a token that the recipe's target does not
        have, as another model does; otherwise None."""
        largest = max(answer.reading.token_ids, default=0)
        if largest < self.vocab_size:
            return None
        return (
            f"the server wrote the token id {largest}, but the target's vocabulary has "
            f"{self.vocab_size}: pass the server's own model as --target"
        )

    async def _attempt(self, answer: Answer) -> None:
        most = self.most_new(answer.request)
        least = min(self.params.min_new_tokens, most)  # servers refuse a larger minimum
        params = replace(self.params, max_new_tokens=most, min_new_tokens=least)
        path, body = self.dialect.body(self.facts, answer.request, params, secrets.token_hex(8))
        url = self.facts.url + path
        async with self.http.post(url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                told = f"HTTP {response.status}: {await error_words(response)}"
                if response.status in _AGAIN:
                    raise Broken(told, _wait_asked(response.headers))
                raise Refused(told)
            events, reading, is_done = Events(), answer.reading, False
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                for data in events.feed(piece):
                    if data == b"[DONE]":
                        is_done = True
                    elif (new := self._read(data, reading)) is not None:
                        answer.chunks.append((now, new))
            if not is_done or reading.finish_reason is None:
                raise Broken("the stream ended before the text was complete")
            if not answer.num_tokens and reading.text:
                raise Refused("the server sends neither token ids nor usage: cannot count tokens")

    def _read(self, data: bytes, reading: Reading) -> int | None:
        """Add an event to `reading`, and return the number of its new tokens. Returns 0 for text
        without ids, and None if the event has neither text nor ids."""
        before = len(reading.token_ids), len(reading.text)
        try:
            event = json.loads(data)
        except RecursionError:
            raise Broken("the server sent an event that is nested too deeply") from None
        if not isinstance(event, dict):
            raise Broken("the server sent an event that is not a JSON object")
        try:
            self.dialect.read(self.facts, event, reading)
        except (KeyError, TypeError, AttributeError) as problem:
            raise Broken(f"the server sent an event of an unknown form: {problem!r}") from None
        counts = [
            *reading.token_ids[before[0] :],
            *([] if reading.usage is None else [reading.usage]),
        ]
        if not all(map(is_count, counts)):
            raise Broken("the server sent a token id or a usage that is not a whole number >= 0")
        new = len(reading.token_ids) - before[0]
        has_text = not reading.token_ids and len(reading.text) > before[1]
        return new if new or has_text else None


def _changed_prompt(answer: Answer) -> str | None:
    """Return an error message if the server read a different prompt from the one that was sent;
    otherwise None."""
    sent, read = list(answer.request.token_ids), answer.reading.prompt_token_ids
    count = answer.reading.num_prompt_tokens if read is None else len(read)
    if count is not None and count != len(sent):
        return f"the server changed the prompt (sent {len(sent)} tokens, it read {count})"
    if read is not None and read != sent:
        return f"the server changed the prompt (sent {len(sent)} tokens, it read others)"
    return None


def _wait_asked(headers: Mapping[str, str]) -> float:
    """Return how many seconds to wait according to the Retry-After header, which holds a number of
    seconds or a date. Returns 0 if the header is missing or invalid."""
    text = headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(text))
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    """Request `url`, and return the HTTP status and the body; 0 and "" if the request fails. Raises
    `TimeoutError` if the answer takes longer than `times.SHORT_S`."""
    try:
        async with asyncio.timeout(times.SHORT_S), http.get(url) as response:
            return response.status, await response.text()
    except TimeoutError:
        raise
    except (aiohttp.ClientError, OSError, ValueError):
        return 0, ""


async def error_words(response: aiohttp.ClientResponse) -> str:
    """Read the error message from the body of a response. If the body is empty, return the HTTP
    reason phrase."""
    text = (await response.content.read(1 << 16)).decode(errors="replace")
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = text.strip() or response.reason
    return words_of(found)
