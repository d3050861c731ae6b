"""Asks a server for its kind, version, proposal length, method and model."""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from specdec_cli.backends.server import times
from specdec_cli.backends.server.client import error_words, get
from specdec_cli.backends.server.counters import Scrape
from specdec_cli.backends.server.dialects import ServerFacts, is_count, listed, words_of
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.recipe.fields import MAX_K
from specdec_cli.text import one_line

_UNREACHED = "check that it is up, its host and its port; sweep-k --serve vllm starts one by itself"
_BREADTH = "speculative_eagle_topk"  # SGLang's tokens after each token of its draft tree


class KeyWantedError(SetupError):
    """The server refuses requests without its API key, so waiting longer would not help."""


def address(text: str, option: str) -> str:
    """Return the base address of a server, without /v1.

    option: the option to name in error messages. Raises `UsageError` if `text` is not an HTTP
    address, or contains a user name or a password.
    """
    _, at, host = text.strip().rpartition("@")
    if at:  # the part before it may be a password, so do not repeat it
        raise UsageError(
            f"{option}: the address of {one_line(host)} contains a user name or a password",
            "leave it out; the key is taken from OPENAI_API_KEY",
        )
    try:
        parts = urlsplit(host)
        has_host, _ = bool(parts.hostname), parts.port
    except ValueError:
        raise UsageError(f"{option}: {one_line(text)} is not an address") from None
    if parts.query or parts.fragment:
        raise UsageError(
            f"{option}: {one_line(text)} has a query or a fragment, which no request would carry",
            "pass the address alone, such as http://localhost:8000",
        )
    if parts.scheme not in ("http", "https") or not has_host:
        raise UsageError(
            f"{option}: expected an address such as http://localhost:8000, got {one_line(text)}"
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


async def look_at(
    http: aiohttp.ClientSession, url: str, served_model: str | None, patience_s: float
) -> ServerFacts:
    """Wait until the server at `url` is healthy, and find out which server it is.

    served_model: the model to ask for; None for the server's only model.
    patience_s: how long to wait, in seconds.

    Raises `SetupError` if no usable server answers in time. Raises `UsageError` if the server does
    not have `served_model`, or if it serves several models and `served_model` is None.
    """
    await _healthy(http, url, patience_s)
    status, models = await _json(http, url, "/v1/models")
    if status in (401, 403):
        raise KeyWantedError(
            f"the server at {url} requires a key (HTTP {status})", "set OPENAI_API_KEY to its key"
        )
    entries = listed(models.get("data"))
    named = {str(m["id"]): m for m in entries if isinstance(m, Mapping) and m.get("id")}
    if not named:
        raise _other_program(url, "/v1/models lists no model")
    chosen = _chosen(url, named, served_model)
    most = chosen.get("max_model_len")
    is_length = type(most) is int and most > 0
    common: dict[str, Any] = {
        "url": url,
        "model": str(chosen["id"]),
        "max_model_len": most if is_length else None,
    }
    _, info = await _json(http, url, "/server_info")
    if "speculative_algorithm" in info:
        return ServerFacts(
            **common,
            kind="sglang",
            version=_text(info.get("version")),
            k=_sglang_k(info),
            method=_text(info["speculative_algorithm"]),
            is_tree=info.get(_BREADTH) not in (None, 1),
            incremental=bool(info.get("incremental_streaming_output")),
        )
    counters = Scrape.answered(*await _answer(http, url, "/metrics"))
    _, version = await _json(http, url, "/version")
    if counters is not None or "version" in version:
        told = _text(version.get("version"))
        k = counters.k if counters is not None else None
        return ServerFacts(**common, kind="vllm", version=told, k=k, method=None)
    return ServerFacts(**common, kind="openai", version=None, k=None, method=None)


def _text(found: object) -> str | None:
    """Return `found` if it is text; None for anything else that a server may report instead."""
    return found if isinstance(found, str) and found.strip() else None


def _sglang_k(info: Mapping[str, Any]) -> int | None:
    """Return the number of proposals per round of an SGLang server; None if its reply holds no
    usable numbers. SGLang's number of draft tokens includes one token that the target has already
    chosen. So for a chain of draft tokens, k is that number minus 1. For a draft tree, k is its
    depth, the number of steps."""
    algorithm = info["speculative_algorithm"]
    if algorithm is None:
        return 0
    steps, tokens = (info.get(f"speculative_num_{name}") for name in ("steps", "draft_tokens"))
    if not (is_count(steps or 0) and is_count(tokens or 0)):
        return None
    # The steps of n-gram lookup are its tokens divided by the breadth of its tree, not its depth.
    if algorithm != "NGRAM" and steps is not None and (tokens is None or info.get(_BREADTH) != 1):
        return steps if steps <= MAX_K else None
    # For chains, the number of steps cannot be used: drafters that propose a whole block at once
    # report one step.
    k = max(0, (tokens or 1) - 1)
    return k if k <= MAX_K else None


def _chosen(
    url: str, models: Mapping[str, Mapping[str, Any]], wanted: str | None
) -> Mapping[str, Any]:
    names = ", ".join(map(one_line, models))
    if wanted is not None:
        if wanted not in models:
            raise UsageError(f"engine.served_model: {url} has no model {wanted}, only {names}")
        return models[wanted]
    if len(models) != 1:
        raise UsageError(
            f"the server at {url} serves {len(models)} models: {names}",
            "choose one with --set engine.served_model=NAME",
        )
    return next(iter(models.values()))


def _other_program(url: str, why: str) -> SetupError:
    return SetupError(
        f"{url} is not an OpenAI-compatible server: {why}",
        "check its port: another program may answer there",
    )


async def _healthy(http: aiohttp.ClientSession, url: str, patience_s: float) -> None:
    """Wait until /health answers with any status except 503. Raises `SetupError` if no server
    answers, or if the server is not healthy within `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            async with asyncio.timeout(max(times.SHORT_S, times.LOOK_S)):
                async with http.get(f"{url}/health") as response:
                    if response.status != 503:
                        return
                    told = f"HTTP 503: {await error_words(response)}"
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as problem:
            why = words_of(getattr(problem, "strerror", None) or problem)
            raise SetupError(f"no server answers at {url}: {why}", _UNREACHED) from None
        except aiohttp.ClientResponseError as problem:
            raise _other_program(url, words_of(problem.message)) from None
        except (aiohttp.ClientError, OSError) as problem:
            told = words_of(problem) or "no answer"
        if time.monotonic() + times.LOOK_S > deadline:
            # Without patience, a caller that has waited longer adds how long it was.
            since = f" after {patience_s:g} s (engine.start_timeout_s)" if patience_s else ""
            raise SetupError(
                f"the server at {url} is not healthy{since}: {told}",
                "its log says what it waits for; "
                f"--set engine.start_timeout_s={2 * patience_s:g} waits longer",
            )
        await asyncio.sleep(times.LOOK_S)


async def _answer(http: aiohttp.ClientSession, url: str, path: str) -> tuple[int, str]:
    """Request a path, and return what `get` does. Raises `SetupError` if there is no answer in
    time, since a server is then neither of another kind nor without what was asked for."""
    try:
        return await get(http, url + path)
    except TimeoutError:
        raise SetupError(
            f"the server at {url} does not answer {path} within {times.SHORT_S:g} s",
            "its log says what it waits for; a server that hangs has to be started again",
        ) from None


async def _json(http: aiohttp.ClientSession, url: str, path: str) -> tuple[int, Mapping[str, Any]]:
    """Request a path, and return the HTTP status and the JSON object of the body. The status is 0
    if the request fails; the object is empty unless the status is 200 and the body is one."""
    status, text = await _answer(http, url, path)
    with suppress(ValueError, RecursionError):
        if status == 200 and isinstance(found := json.loads(text), Mapping):
            return status, found
    return status, {}
