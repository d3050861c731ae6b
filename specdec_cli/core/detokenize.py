"""Turns token ids into text as they arrive, and finds stop strings in the text."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from specdec_cli.errors import UsageError

# A decoder may need a few tokens of context for spaces and multi-byte characters.
_CONTEXT = 8
_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Tokenizer(Decoder, Protocol):
    """The tokenizer that commands use. By default it has no chat template, no end token and an
    empty vocabulary."""

    @property
    def has_template(self) -> bool:
        return False

    @property
    def end_token(self) -> tuple[int, str] | None:
        """The id and the text of the tokenizer's own end token; None if it has none."""
        return None

    @property
    def special_tokens(self) -> frozenset[str]:
        """The texts of tokens that mark a text's structure, such as `<|im_start|>`."""
        return frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        template: Mapping[str, object] = MappingProxyType({}),
    ) -> str: ...

    def unread(self, template: Mapping[str, object]) -> list[str]:
        """Return the names of the inputs in `template` that the chat template never reads.
        `template` is as for `render`."""
        return []

    def vocabulary(self) -> dict[str, int]:
        return {}

    def finding(self, texts: Sequence[str]) -> Decoder:
        """Return a decoder for text that will be searched for `texts`. If one of `texts` contains a
        special token, the decoder keeps special tokens, so that the search can find them."""
        return self


class TextStream:
    """Decodes a growing list of tokens into pieces of text that never split a character.

    Each step decodes only a short window of the last tokens. The window begins at the start of a
    character, because some decoders would otherwise turn all following byte tokens into replacement
    characters.
    """

    def __init__(self, tokenizer: Decoder, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        start = max(0, len(context) - _CONTEXT)
        earliest = max(0, start - _CONTEXT)
        while start > earliest and tokenizer.decode(context[start:]).startswith(_REPLACEMENT):
            start -= 1
        self._window = list(context[start:])
        self._boundary = len(self._window)  # the window may be cut here, after a whole character
        self._shown = tokenizer.decode(self._window)

    def feed(self, token_id: int) -> str:
        """Add a token, and return the text that it completes; "" while the last character is
        incomplete."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) < 4 * _CONTEXT:
            return ""
        piece = text[len(self._shown) :]
        self._shown = text
        if len(self._window) - self._boundary >= _CONTEXT:
            del self._window[: self._boundary]
            self._boundary = len(self._window)
            self._shown = self._tokenizer.decode(self._window)
        return piece


class StopFinder:
    """Finds the first stop string in one sequence's output, even if it spans several tokens.
    Without stop strings it finds nothing. Raises `UsageError` for an empty one, which would end an
    output at once, and for a string instead of a tuple, since each character would be one."""

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int], stop: tuple[str, ...]) -> None:
        if isinstance(stop, str) or not all(stop):
            told = "one string" if isinstance(stop, str) else "empty in one place"
            raise UsageError(f"stop is {told}, but it must be a tuple of stop strings")
        self._stream = TextStream(tokenizer, prompt)
        self._stop = stop
        self._keep = max((len(s) for s in stop), default=1) - 1
        self._tail = ""

    def feed(self, tokens: Sequence[int]) -> int | None:
        """Add tokens, and look for a stop string. Returns how many of `tokens` to keep, up to and
        including the one that completes it; None if no stop string is complete."""
        for count, token in enumerate(tokens, start=1):
            piece = self._stream.feed(token)
            text = self._tail + piece
            if any(s in text for s in self._stop):
                return count
            self._tail = text[len(text) - self._keep :] if self._keep < len(text) else text
        return None


def text_before(
    tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int], stop: tuple[str, ...]
) -> str:
    """Return the text of a completion before its first stop string, without special tokens."""
    decoder = tokenizer.finding(stop)
    whole = decoder.decode(token_ids)
    stream = TextStream(decoder, prompt)
    seen = "".join(map(stream.feed, token_ids))
    if seen == f" {whole}" or not any(s in whole for s in stop):
        # Some tokenizers drop the space before the first word of a text. `StopFinder` decodes the
        # tokens together with the prompt's last ones, which keeps that space, so the stop string
        # that it found may begin with the space.
        text = cut_at_stop(f" {whole}", stop)[1:]
    else:
        text = cut_at_stop(whole, stop)
    if decoder is tokenizer:
        return text
    count = len(token_ids)
    while len(decoder.decode(token_ids[:count])) > len(text):
        count -= 1
    before = decoder.decode(token_ids[:count])
    return tokenizer.decode(token_ids[:count]) + text[len(before) :]


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """Return `text` up to the start of the first stop string in it."""
    found = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(found)] if found else text
