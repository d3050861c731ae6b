"""A session that sends requests to servers. Each proposal length k has its own server, and a run
at k sends its requests to that server."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import aiohttp
import numpy as np

from specdec_cli.backends.base import Finished, OnRound
from specdec_cli.backends.server import times
from specdec_cli.backends.server.answers import NO_ROUNDS, all_rounds, finished, shares
from specdec_cli.backends.server.client import Answer, Client, Limits, get, new_session
from specdec_cli.backends.server.counters import LATE, OTHERS, RESET, UNREAD, Scrape, difference
from specdec_cli.backends.server.dialects import Dialect, ServerFacts
from specdec_cli.backends.server.openai import OpenAI, Vllm
from specdec_cli.backends.server.sglang import Sglang
from specdec_cli.core.figures import Counted
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.types import Arrivals, Request, SamplingParams

DIALECTS: Mapping[str, Dialect] = {one.kind: one for one in (Vllm(), Sglang(), OpenAI())}
_SCRAPES = 20
# If more requests than this run at once, counters may still rise after the last answer has arrived.
_LAGGING = 128


@dataclass(frozen=True, slots=True)
class AllTokens:
    """All tokens of one answer. `num_accepted` is 0, since servers do not report which of the
    tokens were proposals."""

    index: int
    token_ids: list[int]
    num_accepted: int = 0


T = TypeVar("T")
_Ask = Callable[[Client], Awaitable[list[Answer]]]


class Line:
    """The event loop and the HTTP connections that all sessions share. Connections are opened when
    they are first needed."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._http: aiohttp.ClientSession | None = None

    def run(self, work: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
        async def connected() -> T:
            if self._http is None:
                self._http = new_session()
            return await work(self._http)

        try:
            return self._runner.run(connected())
        except ExceptionGroup as group:  # its own message says only that tasks failed
            raise group.exceptions[0] from group

    def close(self) -> None:
        self._runner.run(self._closed())
        self._runner.close()

    async def _closed(self) -> None:
        # After an interruption, requests may still be running. Cancel them first, because a request
        # that still runs when its session is closed ends with a traceback.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._http is not None:
            await self._http.close()


async def scrape(http: aiohttp.ClientSession, url: str) -> Scrape | None:
    """Read the server's counters from /metrics. Returns None if it has none, or if they cannot be
    read."""
    try:
        return Scrape.answered(*await get(http, f"{url}/metrics"))
    except TimeoutError:
        return None


@dataclass(slots=True, eq=False)
class ServerSession:
    """A session whose requests are answered by servers, one server at a time.

    servers: the servers, by their proposal length k.
    batch_size: the maximum number of concurrent requests; 0 for no limit.
    may_skip: the k whose servers may propose nothing in a round, as n-gram lookup may.
    check: a function that takes a time in seconds, and raises `RunError` if a server that we
        started ends within this time.
    """

    servers: Mapping[int, ServerFacts]
    batch_size: int
    max_model_len: int
    vocab_size: int
    limits: Limits
    may_skip: Collection[int]
    line: "Line"
    check: Callable[[float], None] = lambda within_s: None

    @property
    def reach(self) -> int:
        return self.max_model_len

    @property
    def weights(self) -> None:
        return None

    def resized(self, batch_size: int) -> "ServerSession":
        return replace(self, batch_size=batch_size)

    def forget_rounds(self) -> None:
        """Do nothing: rounds run on the server, so this session holds nothing that could be
        freed."""

    def logits_after(
        self, tokens: list[int], width: int, start: int, params: SamplingParams
    ) -> np.ndarray:
        raise NotImplementedError("servers send no logits; commands that need them refuse servers")

    def forecast(
        self, request: Request, output: list[int], k: int, params: SamplingParams
    ) -> Forecast | None:
        return None

    def run(
        self, requests: Sequence[Request], k: int, params: SamplingParams, on_round: OnRound
    ) -> None:
        """Answer all requests. `on_round` is called once, at the end, since the server's counters
        cover the rounds of all requests together."""
        done = self._asked(lambda client: client.ask_all(requests), k, params)
        on_round([AllTokens(one.index, one.token_ids) for one in done], done)

    def arrive(
        self, arrivals: Arrivals, k: int, params: SamplingParams, on_sign: Callable[[], None]
    ) -> list[Finished]:
        return self._asked(lambda client: client.ask_arrivals(arrivals), k, params)

    def _asked(self, ask: _Ask, k: int, params: SamplingParams) -> list[Finished]:
        self.check(0.0)
        answers, counted = self.line.run(lambda http: self._answers(http, ask, k, params))
        has_failed = any(answer.error is not None for answer in answers)
        self.check(times.END_S if has_failed else 0.0)
        return self._finished(answers, counted, k, params)

    def _context(self, k: int) -> int:
        """Return the largest number of tokens of a prompt and its answer at this k."""
        # SGLang's EAGLE methods reserve space for a round's tokens in the context.
        reserved = k + 1 if k and self.servers[k].kind == "sglang" else 0
        return self.max_model_len - reserved

    async def _answers(
        self, http: aiohttp.ClientSession, ask: _Ask, k: int, params: SamplingParams
    ) -> tuple[list[Answer], Counted | str | None]:
        """Send the requests to the server that has this k, and read its counters before and after.

        Returns the answers and the result of `difference`: how much the counters grew, or a warning
        code, which is `UNREAD` if they could only be read before. The latter is None without
        counters.
        """
        facts = self.servers[k]
        dialect = DIALECTS[facts.kind]
        before = await scrape(http, facts.url) if dialect.counts else None
        most = self.batch_size or None
        lengths = self._context(k), self.vocab_size
        client = Client(http, dialect, facts, params, self.limits, *lengths, most)
        answers = await ask(client)
        if before is None:
            return answers, None
        tokens = sum(a.num_tokens for a in answers if a.error is None)
        # The server may have generated more tokens than we received: some after a stop string, and
        # some in failed attempts.
        beyond = len(answers) * (k + 1) if params.stop else 0
        more = sum(a.lost_tokens for a in answers) + beyond
        lags = min(self.batch_size or len(answers), len(answers)) > _LAGGING
        after, found = before, None
        for _ in range(_SCRAPES):
            last, now = after, await scrape(http, facts.url)
            if now is None:
                return answers, UNREAD
            after, found = now, difference(before, now, k, tokens, more)
            if found != LATE and (not lags or after == last):
                break
            await asyncio.sleep(times.SCRAPE_S)
        if after.cache_hits > before.cache_hits and found not in (RESET, OTHERS):
            answers[-1].reading.cached_tokens = 1
        return answers, found

    def _finished(
        self,
        answers: Sequence[Answer],
        counted: Counted | str | None,
        k: int,
        params: SamplingParams,
    ) -> list[Finished]:
        done = [a for a in answers if a.error is None]
        source, rounds, of_all, remarks = all_rounds(done, counted, k, may_skip=k in self.may_skip)
        of = dict(zip((id(a) for a in done), rounds, strict=True))
        chunks = {i: a.chunks for i, a in enumerate(answers) if a.error is None and a.chunks}
        decode = shares({i: (found[0][0], found[-1][0]) for i, found in chunks.items()})
        whole = shares({i: (answers[i].began, found[-1][0]) for i, found in chunks.items()})
        found = [
            finished(
                *(answer, self.servers[k], k, source, of.get(id(answer), NO_ROUNDS)),
                (decode.get(place, 0.0), whole.get(place, 0.0)),
                min(params.max_new_tokens, self._context(k) - len(answer.request.token_ids)),
                may_skip=k in self.may_skip,
            )
            for place, answer in enumerate(answers)
        ]
        return _with_common(found, of_all, remarks)


def _with_common(
    found: list[Finished], of_all: Counted | None, remarks: set[str]
) -> list[Finished]:
    """Add the counts `of_all` and the warning codes `remarks`, which describe all answers together,
    to the last answer without an error, and return the answers. Only one answer carries them, so
    that they are counted only once. If every answer has an error, they are dropped."""
    place = next((i for i in reversed(range(len(found))) if found[i].error is None), None)
    if place is not None and (served := found[place].served) is not None:
        codes = (*served.remarks, *sorted(remarks))
        common = replace(served, counted=of_all, remarks=codes)
        found[place] = replace(found[place], served=common)
    return found
