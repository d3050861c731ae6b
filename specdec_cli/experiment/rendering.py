"""Renders conversations with chat templates, whatever form of messages a template supports."""

import json
from collections.abc import Mapping
from contextlib import suppress

from specdec_cli.core.detokenize import Tokenizer
from specdec_cli.errors import SpecdecError
from specdec_cli.prompts.types import Message


def filled(
    tokenizer: Tokenizer, messages: tuple[Message, ...], template: Mapping[str, object]
) -> str:
    """Render the messages with the chat template.

    Content may be a list of text parts, and a tool call's arguments may be JSON text, as OpenAI's
    format has them. Most templates need an object there, so vLLM's server parses the text, and so
    does this. If the template does not support parts or objects (it refuses them, loses texts or
    writes them in Python's notation), parts are joined, and JSON text stays text.
    """
    ways = [messages]
    if in_parts := [m for m in messages if isinstance(m.get("content"), list)]:
        ways.append(tuple({**m, "content": "\n".join(texts_of(m))} for m in messages))
    parsed = [tuple(map(_parsed, way)) for way in ways]
    if parsed[0] != messages:
        ways = parsed + ways
    texts = [text.strip() for m in in_parts for text in texts_of(m)]
    called = [one for message in parsed[0] for one in _arguments_of(message)]
    notations = [str(one) for one in (*(m["content"] for m in in_parts), *called) if one]
    found, problems = list[tuple[int, str]](), list[SpecdecError]()
    for way in ways:
        try:
            text = tokenizer.render(way, template)
        except SpecdecError as problem:
            problems.append(problem)
            continue
        wrong = sum(t not in text for t in texts) + sum(t in text for t in notations)
        found.append((wrong, text))
        if not wrong:
            break
    if not found:
        raise problems[-1]
    return min(found, key=lambda one: one[0])[1]


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message's content, one for each part."""
    content = message.get("content") or ""
    return [part["text"] for part in content] if isinstance(content, list) else [str(content)]


def _parsed(message: Message) -> Message:
    """Return the message with its tool calls' arguments as objects, where they are JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    if isinstance(inner := call.get("function"), Mapping):
        return {**call, "function": _parsed_call(inner)}
    if isinstance(text := call.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            found = json.loads(text or "{}")  # some clients write no text for no arguments
            if isinstance(found, dict):
                return {**call, "arguments": found}
    return call


def _arguments_of(message: Message) -> list[object]:
    """Return the arguments of the message's tool calls that are objects."""
    calls = message.get("tool_calls")
    calls = [one for one in calls if isinstance(one, Mapping)] if isinstance(calls, list) else []
    given = [inner if isinstance(inner := one.get("function"), Mapping) else one for one in calls]
    return [found for one in given if isinstance(found := one.get("arguments"), Mapping)]
