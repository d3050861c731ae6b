"""A server that speaks vLLM's and SGLang's dialects, knows the truth about what it wrote, and
misbehaves on demand. It runs on a thread's own event loop in the tests' process."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

ROUND_S = 0.001
CROWD = 40  # requests a second up to which rounds keep their speed


@dataclass
class Written:
    """The server's work for one request. rounds: tokens accepted in each, as the engine counts."""

    prompt: list[int]
    tokens: list[int]
    rounds: list[int]
    salt: str | None
    body: dict[str, Any]
    arrived: float
    chunk_times: list[float] = field(default_factory=list)


@dataclass
class Faults:
    """Misbehaviour of the server. A number is the count of requests that it still hits.

    statuses: answered in turn, with headers, before anything else. cut: the stream ends after two
    chunks, by a reset or (clean) in order. usage: added to the count, or None for none. pieces:
    bytes of each write, with CRLF and comments. merge: rounds a chunk. reset_after: requests after
    which counters begin anew. foreign: tokens of others beside each request. bos: tokens put
    before each prompt. most: tokens of a text, whatever is asked for. other_text: whether the last
    token is another. hits: prefix cache hits. no_ids: texts alone. no_done, no_reason: streams that
    end without `[DONE]`, or without a finish reason. end: vLLM's finish reason of an abort. split:
    each round comes in two chunks. ids: in place of each chunk's token ids. refuse: numbers of the
    requests that are refused. bos_of: `bos` is put before prompts of so many tokens alone. beyond:
    tokens written in excess of those asked for. last: the last token's id. silent: whether texts
    are empty, as if the model ended them at once. unread_after: requests after which /metrics
    fails.
    """

    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    cut: int = 0
    clean: bool = True
    error_event: int = 0
    abort: int = 0
    end: str = "abort"
    hang: int = 0
    usage: int | None = 0
    early_empty: float = 0.0
    pieces: int | None = None
    merge: int = 1
    reset_after: int | None = None
    foreign: int = 0
    bad_details: str | None = None
    bos: int = 0
    other_text: bool = False
    hits: bool = False
    late_s: float = 0.0
    most: int | None = None
    no_ids: bool = False
    no_done: int = 0
    no_reason: int = 0
    split: bool = False
    ids: list[Any] | None = None
    refuse: frozenset[int] = frozenset()
    beyond: int = 0
    last: int | None = None
    bos_of: int | None = None
    silent: bool = False
    unread_after: int | None = None


@dataclass
class FakeServer:
    """dialect: vllm, sglang or openai. detailed: vLLM's per-request details. slots: requests that
    run at a time. crowd: a round takes so many times as long while more than `CROWD` requests a
    second arrive. ill: the words of /health. info, model: values that take the place of its own in
    what it tells of itself, and of its models. metrics: the text of /metrics. skips: whether rounds
    that accept nothing had no proposals, so that it does not count them. mute: a path that never
    answers."""

    dialect: str = "vllm"
    k: int = 3
    detailed: bool = False
    version: str = "0.25.1"
    models: tuple[str, ...] = ("demo",)
    key: str | None = None
    algorithm: str = "STANDALONE"
    topk: int = 1
    slots: int | None = None
    round_s: float = ROUND_S
    crowd: float = 1.0
    engines: int = 1
    ordered: bool = True
    incremental: bool = False
    has_metrics: bool = True
    eos_every: int = 0
    health: int = 200
    ill: str = ""
    page: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    metrics: str | None = None
    skips: bool = False
    mute: str = ""
    faults: Faults = field(default_factory=Faults)
    written: list[Written] = field(default_factory=list)
    url: str = ""
    counters: Counter[str] = field(default_factory=Counter)
    created: float = 1000.0
    arrivals: list[float] = field(default_factory=list)
    running: int = 0
    asked: int = 0

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health, text=self.ill)

    def _authorised(self, request: web.Request) -> None:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized(text=json.dumps({"error": "no valid key"}))

    async def _models(self, request: web.Request) -> web.Response:
        self._authorised(request)
        if self.page is not None:
            return web.Response(text=self.page, content_type="text/html")
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": m, "max_model_len": 512} | self.model for m in self.models],
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        if self.dialect != "sglang":
            raise web.HTTPNotFound
        return web.json_response(
            {
                "speculative_algorithm": self.algorithm if self.k else None,
                "speculative_num_steps": self._steps(),
                "speculative_num_draft_tokens": self._drafted() + 1 if self.k else None,
                "speculative_eagle_topk": self.topk if self.k else None,
                "incremental_streaming_output": self.incremental,
                "version": self.version,
                "internal_states": [{"avg_spec_accept_length": 99.0}],
            }
            | self.info
        )

    def _drafted(self) -> int:
        """Proposals of a round; n-gram lookup proposes k, whatever its tree looks like."""
        return self.k * (1 if self.algorithm == "NGRAM" else self.topk)

    def _steps(self) -> int | None:
        """A drafter of blocks takes one step. For n-grams SGLang divides tokens by breadth."""
        if self.algorithm == "NGRAM":
            return (self.k + 1) // self.topk
        return 1 if self.algorithm == "DFLASH" else self.k or None

    async def _version(self, _: web.Request) -> web.Response:
        if self.dialect != "vllm":
            raise web.HTTPNotFound
        return web.json_response({"version": self.version} | self.info)

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.dialect != "vllm" or not self.has_metrics:
            raise web.HTTPNotFound
        if (last := self.faults.unread_after) is not None and len(self.written) >= last:
            raise web.HTTPServiceUnavailable
        if self.metrics is not None:
            return web.Response(text=self.metrics)
        names = ["generation_tokens", "prefix_cache_hits"]
        if self.k:
            names += [f"spec_decode_num_{n}" for n in ("drafts", "draft_tokens", "accepted_tokens")]
        lines = ["vllm:spec_decode_accept_gauge 99.0"]
        for engine in range(self.engines):
            own = (1 if engine == 0 else 0) if self.engines == 1 else None
            for name in names:
                lines += self._series(name, engine, f'engine="{engine}"', own)
            for place in range(self.k):
                labels = f'engine="{engine}",position="{place}"'
                name = "spec_decode_num_accepted_tokens_per_pos"
                lines += self._series(name, engine, labels, own, f"{name}{place}")
        return web.Response(text="\n".join(lines) + "\n")

    def _series(
        self, name: str, engine: int, labels: str, own: int | None, key: str | None = None
    ) -> list[str]:
        value = self.counters[key or name]
        if own is None:  # several engines: the first has a third, the last the rest
            value = value // 3 if engine == 0 else value - value // 3 if engine == 1 else 0
        return [
            f"# TYPE vllm:{name} counter",
            f"vllm:{name}_total{{{labels}}} {value}.0",
            f"vllm:{name}_created{{{labels}}} {self.created}",
        ]

    def truth(self, prompt: list[int], most: int, *, ignore_eos: bool) -> tuple[list[int], bool]:
        """The text of a prompt, the same at every k, and whether it ends by itself."""
        numbers = random.Random(str(prompt))
        tokens = [numbers.randrange(20, 90) for _ in range(most)]
        if self.eos_every and not ignore_eos and len(prompt) % self.eos_every == 0 and most > 4:
            return [*tokens[: most // 2], 2], True
        return tokens, False

    def _rounds(self, prompt: list[int], count: int) -> list[int]:
        """Accepted tokens of each round, until rounds have made `count` tokens or more."""
        numbers, made, found = random.Random(f"{prompt} {self.k}"), 0, []
        while made < count:
            accepted = numbers.randrange(self.k + 1) if self.k else 0
            found.append(accepted)
            made += accepted + 1
        return found

    def _take(self, name: str) -> bool:
        left = getattr(self.faults, name)
        setattr(self.faults, name, max(0, left - 1))
        return bool(left > 0)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._authorised(request)
        arrived, body = time.perf_counter(), await request.json()
        self.asked += 1
        if self.asked in self.faults.refuse:
            return web.json_response({"error": {"message": "planted"}}, status=400)
        if self.faults.statuses:
            status, headers = self.faults.statuses.pop(0)
            words = {"error": {"message": f"planted {status}"}}
            return web.json_response(words, status=status, headers=headers)
        if self.dialect == "sglang":
            sent, params = list(body["input_ids"]), body["sampling_params"]
            most, salt = params["max_new_tokens"], body.get("extra_key")
        else:
            sent, params = list(body["prompt"]), body
            most, salt = body["max_tokens"], body.get("cache_salt")
        least = params.get("min_new_tokens", params.get("min_tokens", 0))
        if least > most:  # as both servers do
            words = {"error": {"message": f"the minimum of {least} exceeds {most}"}}
            return web.json_response(words, status=400)
        most = min(most, self.faults.most or most) + self.faults.beyond
        of = self.faults.bos_of
        prompt = ([1] * self.faults.bos if of in (None, len(sent)) else []) + sent
        tokens, is_eos = self.truth(sent, most, ignore_eos=params.get("ignore_eos", False))
        if self.faults.other_text:
            tokens = [*tokens[:-1], tokens[-1] + 1]
        if self.faults.last is not None:
            tokens = [*tokens[:-1], self.faults.last]
        rounds = self._rounds(sent, len(tokens) - 1)
        done = Written(sent, tokens, rounds, salt, body, arrived)
        self.arrivals.append(arrived)
        if self.faults.reset_after is not None and len(self.written) >= self.faults.reset_after:
            self.counters.clear()
            self.created += 1
            self.faults.reset_after = None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while self.slots is not None and self.running >= self.slots:
            await asyncio.sleep(self.round_s / 2)
        self.running += 1
        try:
            return await self._stream(response, request, prompt, done, is_eos)
        finally:
            self.running -= 1

    def _is_crowded(self) -> bool:
        since = time.perf_counter() - 0.5
        return sum(at > since for at in self.arrivals) > 0.5 * CROWD

    async def _stream(
        self,
        response: web.StreamResponse,
        request: web.Request,
        prompt: list[int],
        done: Written,
        is_eos: bool,
    ) -> web.StreamResponse:
        faults, tokens = self.faults, done.tokens
        cut, error, abort = (self._take(n) for n in ("cut", "error_event", "abort"))
        hang, no_done, no_reason = (self._take(n) for n in ("hang", "no_done", "no_reason"))
        if faults.early_empty:
            await self._send(response, self._event(prompt, [], [], None, is_eos))
            await asyncio.sleep(faults.early_empty)
        sizes = [1]
        for accepted in done.rounds:
            sizes.append(min(accepted + 1, len(tokens) - sum(sizes)))
        sizes = [size for size in sizes if size]
        if faults.split:
            sizes = [part for size in sizes for part in (1, size - 1) if part]
        groups = [sizes[:1]]
        step = faults.merge
        groups += [sizes[i : i + step] for i in range(1, len(sizes), step)]
        at = 0
        for number, group in enumerate(groups):
            for _ in group:
                await asyncio.sleep(self.round_s * (self.crowd if self._is_crowded() else 1.0))
            new, at = tokens[at : at + sum(group)], at + sum(group)
            is_last = at == len(tokens)
            if number == 2 and (cut or error or abort or hang):
                return await self._misbehave(response, request, error, abort, hang)
            done.chunk_times.append(time.perf_counter())
            if is_last:
                self._count(done)
            finish = ("eos" if is_eos else "length") if is_last and not no_reason else None
            event = self._event(prompt, tokens[:at], new, finish, is_eos)
            if is_last and self.dialect == "sglang":
                event["meta_info"] |= self._details(done)
            await self._send(response, event)
        if self.dialect != "sglang" and faults.usage is not None:
            usage: dict[str, Any] = {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(tokens) + faults.usage,
            }
            last: dict[str, Any] = {"choices": [], "usage": usage}
            if self.detailed and self.k and self.dialect == "vllm":
                last["metrics"] = {"speculative_decoding": self._details(done)}
            await self._send(response, last)
        if not no_done:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _misbehave(
        self,
        response: web.StreamResponse,
        request: web.Request,
        error: bool,
        abort: bool,
        hang: bool,
    ) -> web.StreamResponse:
        if hang:
            await asyncio.sleep(30)
        if error:
            await self._send(response, {"error": {"message": "planted in the stream"}})
            await response.write(b"data: [DONE]\n\n")
        elif abort:
            event: dict[str, Any] = {"choices": [{"text": "", "finish_reason": self.faults.end}]}
            if self.dialect == "sglang":
                end = {"type": "abort", "message": "planted abort", "status_code": 503}
                event = {"text": "", "output_ids": [], "meta_info": {"finish_reason": end}}
            await self._send(response, event)
            await response.write(b"data: [DONE]\n\n")
        elif not self.faults.clean:
            assert request.transport is not None
            request.transport.abort()
        return response

    def _count(self, done: Written) -> None:
        """Count before the last chunk leaves, as vLLM does, or later."""

        def count() -> None:
            self.written.append(done)
            c = self.counters
            c["generation_tokens"] += len(done.tokens) + self.faults.foreign
            c["prefix_cache_hits"] += 16 if self.faults.hits else 0
            if self.k:
                c["spec_decode_num_drafts"] += len(done.rounds)
                c["spec_decode_num_draft_tokens"] += self.k * len(done.rounds)
                c["spec_decode_num_accepted_tokens"] += sum(done.rounds)
            for place in range(self.k):
                accepted = sum(a > place for a in done.rounds)
                c[f"spec_decode_num_accepted_tokens_per_pos{place}"] += accepted

        if self.faults.late_s:
            asyncio.get_running_loop().call_later(self.faults.late_s, count)
        else:
            count()

    def _details(self, done: Written) -> dict[str, Any]:
        if not self.k:
            return {}
        told = [a for a in done.rounds if a or not self.skips]
        histogram = [told.count(a) for a in range(max(told, default=0) + 1)]
        accepted, rounds = sum(told), len(told)
        match self.faults.bad_details:
            case "sum":
                histogram[0] += 1
            case "beyond_k":
                histogram += [0] * self.k + [1]
            case "few":
                rounds, histogram, accepted = 1, [1], 0
            case "form":
                return {"spec_verify_ct": "a", "num_spec_steps": "a"} | dict.fromkeys(
                    ("acceptance_histogram", "per_step_accepted", "spec_correct_drafts_histogram"),
                    5,
                )
        proposed: Any = rounds * (self._drafted() if self.dialect == "sglang" else self.k)
        if self.faults.bad_details == "proposed":
            proposed = "a"
        if self.faults.bad_details == "huge":
            rounds, histogram, accepted, proposed = 10**30, [10**30], 0, 0
        if self.dialect == "sglang":
            return {
                "spec_verify_ct": rounds,
                "spec_num_correct_drafts": accepted,
                "spec_num_proposed_drafts": proposed,
                "spec_correct_drafts_histogram": histogram,
                "spec_accept_length": len(done.tokens) / max(1, rounds),
            }
        steps = {
            "per_step_accepted": done.rounds,
            "per_step_drafted": [self.k] * len(done.rounds),
        }
        return {
            "acceptance_histogram": [*histogram, *[0] * (self.k + 1 - len(histogram))],
            "num_spec_steps": rounds,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": proposed,
            "mean_acceptance_length": 99.0,
        } | (steps if self.ordered and self.faults.bad_details is None else {})

    def _event(
        self, prompt: list[int], so_far: list[int], new: list[int], end: str | None, is_eos: bool
    ) -> dict[str, Any]:
        if self.dialect == "sglang":
            reason: dict[str, Any] | None = None
            if end is not None:
                reason = {"type": "stop", "matched": 2} if is_eos else {"type": "length"}
            usage = self.faults.usage or 0
            return {
                "text": " ".join(map(str, so_far)),
                "output_ids": self.faults.ids or (new if self.incremental else so_far),
                "meta_info": {
                    "finish_reason": reason,
                    "prompt_tokens": len(prompt),
                    "completion_tokens": len(so_far) + usage,
                    "cached_tokens": 16 if self.faults.hits else 0,
                },
            }
        choice: dict[str, Any] = {
            "index": 0,
            "text": "" if self.faults.silent else "".join(f" {t}" for t in new),
            "finish_reason": {"eos": "stop", "length": "length", None: None}[end],
            "stop_reason": None,
        }
        if self.dialect == "vllm" and not self.faults.no_ids:
            choice["token_ids"] = self.faults.ids or new
            if len(so_far) == len(new):
                choice["prompt_token_ids"] = prompt
        return {"choices": [choice]}

    async def _send(self, response: web.StreamResponse, event: Mapping[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\n\n".encode()
        if self.faults.pieces is None:
            await response.write(data)
            return
        data = b": a comment\r\n\r\n" + data.replace(b"\n", b"\r\n")
        for start in range(0, len(data), self.faults.pieces):
            await response.write(data[start : start + self.faults.pieces])

    def app(self) -> web.Application:
        @web.middleware
        async def muted(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path == self.mute:
                await asyncio.sleep(30)
            answer: web.StreamResponse = await handler(request)
            return answer

        found = web.Application(middlewares=[muted])
        found.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/server_info", self._server_info),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.post("/v1/completions", self._complete),
                web.post("/generate", self._complete),
            ]
        )
        return found


@contextmanager
def running(*servers: FakeServer) -> Iterator[None]:
    """Run servers, each with an address of its own, during the block."""
    loop = asyncio.new_event_loop()

    async def start() -> list[web.AppRunner]:
        runners = []
        for server in servers:
            runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            runners.append(runner)
        return runners

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    runners = call(start())
    try:
        yield
    finally:
        for runner in runners:
            call(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
