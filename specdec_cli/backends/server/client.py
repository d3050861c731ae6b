"""The client sends each request when it is due and there is room, and reads the answers.

It measures times on its own clock, the same for all requests of a run. Dialects are elsewhere.
"""

import asyncio
import json
import random
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    key,
    without_key,
    words_of,
)
from specdec_cli.core.types import Arrivals, Request, SamplingParams

_AGAIN = (429, 500, 502, 503, 504)
_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(slots=True)
class Answer:
    """The outcome of one request. chunks: the time and the number of new tokens of each chunk that
    holds text or tokens. sent: the time at which the request could be sent. began: the start of the
    attempt that was answered. error: the reason if there is no usable answer; otherwise None.
    lost_tokens: tokens that failed attempts may have generated."""

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
        """The number of output tokens, counted by ids or else by `usage`."""
        return len(self.reading.token_ids) or self.reading.usage or 0

    @property
    def tokens_in_first(self) -> int:
        """The number of tokens in the first chunk; 1 if chunks hold only text."""
        return (self.chunks[0][1] or 1) if self.chunks else 0

    @property
    def sizes(self) -> list[int]:
        """The number of tokens in each chunk after the first."""
        return [count for _, count in self.chunks[1:]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request. timeout_s: the time limit of one attempt. retries: the number of
    attempts after the first."""

    timeout_s: float
    retries: int


class Events:
    """A parser of one stream of server-sent events, whose pieces may be cut anywhere.

    Comments and other fields than `data` are skipped, and the lines of one event joined, as the
    HTML standard on server-sent events says.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completes."""
        text = self._rest + piece
        # A carriage return at the end may be the first half of a line's end.
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
    """A session of connections without a limit on their number. The key is taken from the
    environment."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
        headers={"Authorization": f"Bearer {own}"} if (own := key()) else None,
        timeout=aiohttp.ClientTimeout(total=None),
    )


@dataclass(frozen=True, slots=True)
class Client:
    """Asks one server. most: the largest number of requests under way; None for no limit."""

    http: aiohttp.ClientSession
    dialect: Dialect
    facts: ServerFacts
    params: SamplingParams
    limits: Limits
    most: int | None

    async def ask_all(self, requests: Sequence[Request]) -> list[Answer]:
        """Send all requests, as many at a time as allowed. Returns the outcomes in the requests'
        order."""
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
        """Send each request when it is due and there is room, until the arrivals are over. Then
        wait for the requests that were sent, since the server counts their tokens."""
        room = asyncio.Semaphore(self.most) if self.most is not None else None
        start, answers = time.perf_counter(), list[Answer]()

        async def ask(answer: Answer) -> None:
            answers.append(answer)
            await self._ask(answer)
            arrivals.answered(answer.request.index)
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
                await asyncio.sleep(0)  # let answers be read even if requests are late

        async with asyncio.TaskGroup() as group:
            sender = group.create_task(send(group))
        return answers

    async def _ask(self, answer: Answer) -> None:
        """Send the request until it is answered or no attempt is left."""
        limits, most_new = self.limits, self.params.max_new_tokens
        for attempt in range(limits.retries + 1):
            answer.reading, answer.chunks, answer.num_retries = Reading(), [], attempt
            answer.began = time.perf_counter()
            try:
                async with asyncio.timeout(limits.timeout_s):
                    await self._attempt(answer)
                answer.error = _changed_prompt(answer)
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

    async def _attempt(self, answer: Answer) -> None:
        path, body = self.dialect.body(
            self.facts, answer.request, self.params, secrets.token_hex(8)
        )
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
                raise Broken("the stream ended before its text did")
            if not answer.num_tokens and reading.text:
                raise Refused("the server sends neither token ids nor usage to count tokens by")

    def _read(self, data: bytes, reading: Reading) -> int | None:
        """Enter an event, and return the number of its new tokens: 0 for text without ids, None
        without text and ids."""
        before = len(reading.token_ids), len(reading.text)
        event = json.loads(data)
        if not isinstance(event, dict):
            raise Broken("the server sent an event that is not a JSON object")
        try:
            self.dialect.read(self.facts, event, reading)
        except (KeyError, TypeError, AttributeError) as problem:
            raise Broken(f"the server sent an event of another form: {problem!r}") from None
        counts = [
            *reading.token_ids[before[0] :],
            *([] if reading.usage is None else [reading.usage]),
        ]
        if any(type(one) is not int or one < 0 for one in counts):
            raise Broken("the server sent token ids or a usage that are not whole numbers >= 0")
        new = len(reading.token_ids) - before[0]
        has_text = not reading.token_ids and len(reading.text) > before[1]
        return new if new or has_text else None


def _changed_prompt(answer: Answer) -> str | None:
    """An error if the server read a different prompt from the one sent."""
    sent, read = list(answer.request.token_ids), answer.reading.prompt_token_ids
    count = answer.reading.num_prompt_tokens if read is None else len(read)
    if count is not None and count != len(sent):
        return f"the server changed the prompt (sent {len(sent)} tokens, it read {count})"
    if read is not None and read != sent:
        return f"the server changed the prompt (sent {len(sent)} tokens, it read others)"
    return None


def _wait_asked(headers: Mapping[str, str]) -> float:
    """The seconds that Retry-After asks for: a number, or a date."""
    text = headers.get("Retry-After", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0


async def error_words(response: aiohttp.ClientResponse) -> str:
    """The message of an answer that reports an error."""
    text = (await response.content.read(1 << 16)).decode(errors="replace")
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text.strip() or response.reason
    return words_of(found)
