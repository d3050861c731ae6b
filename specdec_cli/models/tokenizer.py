"""Tokenizers, and a check that two models use the same token ids."""

import filecmp
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from copy import copy
from datetime import datetime
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from specdec_cli.core.detokenize import Decoder, Tokenizer
from specdec_cli.errors import SetupError, SpecdecError, UsageError
from specdec_cli.models.config_file import LFS_HINT, is_lfs_pointer, json_object
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.gguf.tokenizer import gguf_tokenizer
from specdec_cli.models.guards import (
    FILE_BYTES,
    MOST_CHARACTERS,
    TEMPLATE_BYTES,
    TEMPLATE_SECONDS,
    bounded,
    check_length,
    growth_of,
    in_time,
    native_lines,
    refusing,
    unsafe_file,
)
from specdec_cli.prompts.records import DATE_KEY, TEMPLATE_KEYS
from specdec_cli.text import reason_of, shown

_FORMATS = "aAbBcCdDeFfgGhHIjklmMnpPrRsStTuUVwWxXyYzZ"
_PLAIN: Mapping[str, object] = {}
_ANY_MESSAGES = [{"role": "user", "content": "hello"}]  # every template should render them
_ONLY_HERE = "the template renders other prompts: check this prompt and its template values"
_ANOTHER_DRAFT = "a draft must share its target's tokenizer; take one of the same family"


class PretrainedTokenizer:
    """Wraps a transformers tokenizer. By default, `encode` adds the special tokens that the
    tokenizer's own settings ask for."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """Wrap a tokenizer. Raises `ValueError` if it could lengthen a text beyond the limits in
        `guards`. name: the model's name, for messages."""
        self._tokenizer = tokenizer
        self._name = name
        self._skips = True  # whether decoded text leaves out special tokens
        # The steps of each part, as in tokenizer.json. A tokenizer in pure Python has no parts.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = {name: getattr(backend, name, None) for name in _PARTS}
        steps = {n: json.loads(p.__getstate__()) for n, p in parts.items() if p is not None}
        growths = {part: growth_of(found, part) for part, found in steps.items()}
        self._growth = math.prod(n for part, n in growths.items() if part != "decoder")
        if (growth := growths.get("decoder", 1)) > 1:
            check_length(max(map(len, tokenizer.get_vocab()), default=0), growth)
        self._decodes_by_regex = '"Regex"' in json.dumps(steps.get("decoder"))

    def _failure(self, problem: BaseException) -> SetupError:
        return SetupError(
            f"the tokenizer of {self._name} fails: {reason_of(problem)}",
            "its files are damaged or were edited; download the model again",
        )

    @property
    def has_template(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def end_token(self) -> tuple[int, str] | None:
        found = self._tokenizer.eos_token_id, self._tokenizer.eos_token
        return None if None in found else found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises `SetupError` if the tokenizer fails or takes too
        long."""
        # Turn off the tokenizer's warnings: specdec itself reports prompts that are too long.
        more = {"add_special_tokens": add_special_tokens, "verbose": False}
        with refusing(self._failure, MemoryError):
            check_length(len(text), self._growth)
            found = in_time(partial(self._tokenizer, text, **more), len(text))
        ids: list[int] = found["input_ids"]
        return ids

    def render(
        self, messages: Sequence[Mapping[str, object]], template: Mapping[str, object] = _PLAIN
    ) -> str:
        """Render a conversation with the model's chat template, and begin the assistant's answer.
        The text includes special tokens.

        template: values for the template besides the messages, by name. Two names are special:
        `chat_template` selects another template, by its Jinja text or by its name in the model;
        `DATE_KEY` sets the time, in ISO format, that the template uses as the current time.

        Raises `UsageError` if there is no template, if it refuses these messages or fails on them
        alone, if `template` has a value that only specdec may set, or if a template from the user
        fails. Raises `SetupError` if the model's own template fails on any messages.
        """
        self._check({name: one for name, one in template.items() if name != DATE_KEY})
        try:
            return self._rendered(messages, template)
        except Exception as problem:
            named, is_usable = template.get("chat_template"), False
            with suppress(Exception):
                is_usable = bool(self._rendered(_ANY_MESSAGES, {"chat_template": named}))
            raise _template_problem(
                problem, self._name, is_own="{" in str(named), is_usable=is_usable
            ) from problem

    def _rendered(
        self, messages: Sequence[Mapping[str, object]], template: Mapping[str, object]
    ) -> str:
        given = dict(template)
        moment = given.pop(DATE_KEY, None)
        written = self._tokenizer.get_chat_template(given.get("chat_template"), given.get("tools"))
        if is_dated := isinstance(moment, str) and DATE_KEY in written:
            given["chat_template"] = at_moment(written, datetime.fromisoformat(str(moment)))
        try:
            with bounded(TEMPLATE_SECONDS, TEMPLATE_BYTES):
                text: str = self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=False, **given
                )
        except TemplateSyntaxError as problem:
            problem.lineno -= is_dated  # the macro has a line of its own
            raise
        if len(text) > MOST_CHARACTERS:
            raise MemoryError
        return text

    def unread(self, template: Mapping[str, object]) -> list[str]:
        names = [name for name in template if name != "chat_template"]
        if not names:
            return []
        written = self._tokenizer.get_chat_template(
            template.get("chat_template"), template.get("tools")
        )
        return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", written)]

    def _check(self, given: Mapping[str, object]) -> None:
        """Raise `UsageError` if the template does not exist, or if `given` has a value that only
        specdec itself may set."""
        named, known = given.get("chat_template"), getattr(self._tokenizer, "chat_template", None)
        if named is None and not self.has_template:
            raise _no_template(self._name)
        names = sorted(known) if isinstance(known, dict) else []
        if named is not None and named not in names and "{" not in str(named):
            own = (
                "it has one, without a name"
                if self.has_template
                else "name a Jinja file that exists"
            )
            listed = f"its names are {', '.join(names)}" if names else own
            told = f"{self._name} has no chat template {shown(named)}, and there is no such file"
            raise UsageError(told, listed)
        ours = {*signature(self._tokenizer.apply_chat_template).parameters, "messages"}
        if wrong := sorted(given.keys() & ours - {*TEMPLATE_KEYS, "chat_template", "kwargs"}):
            raise UsageError(
                f"{wrong[0]} is set by specdec, and cannot be given to a chat template"
            )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises `SetupError` if the tokenizer fails or takes too
        long."""
        ids = list(token_ids)
        with refusing(self._failure, MemoryError):
            if self._decodes_by_regex:
                # A decoder with regular expressions may take very long. It releases the GIL, which
                # the time limit needs. Other decoders hold the GIL, but take only linear time. For
                # them, a limit would also cost more than decoding a token.
                decode = self._tokenizer.backend_tokenizer.decode_batch
                found = in_time(partial(decode, [ids], skip_special_tokens=self._skips), len(ids))
                return str(found[0])
            text: str = self._tokenizer.decode(
                ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False
            )
        return text

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    @property
    def special_tokens(self) -> frozenset[str]:
        """The texts of tokens that mark a text's structure, such as `<|im_start|>`."""
        added = self._tokenizer.added_tokens_decoder.values()
        names = {*self._tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
        return frozenset(filter(None, names))

    def finding(self, texts: Sequence[str]) -> Decoder:
        """Return a decoder for text that will be searched for `texts`. If one of `texts` contains a
        special token, the decoder does not leave out special tokens. Otherwise, return this
        tokenizer itself."""
        if not any(name in text for name in self.special_tokens for text in texts):
            return self
        verbatim = copy(self)
        verbatim._skips = False
        return verbatim


class ByteTokenizer(Tokenizer):
    """Takes the UTF-8 bytes of a text, modulo the vocabulary size, as its token ids. It is used for
    dummy weights if the model's folder has no tokenizer."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte % self._vocab_size for byte in text.encode()]

    def render(
        self, messages: Sequence[Mapping[str, object]], template: Mapping[str, object] = _PLAIN
    ) -> str:
        raise _no_template("without a tokenizer")

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in token_ids)


# Patterns of the files that hold a vocabulary. A folder with only tokenizer_config.json has none.
_FILES = ("tokenizer.json", "tokenizer.*.json", "vocab.*", "tekken.json", "*.model", "*.tiktoken")
_CONFIG = "tokenizer_config.json"
_MORE_FILES = (
    *("special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template*"),
    _CONFIG,
)
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_NEEDED = "the model folder needs its tokenizer files (tokenizer.json)"


def has_tokenizer(place: Path) -> bool:
    """Return True if a model's folder or GGUF file holds a tokenizer, or a folder's own code makes
    one."""
    return is_gguf(place) or _has_vocabulary(place) or _has_code(place)


def _has_vocabulary(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _FILES)


def _has_code(folder: Path) -> bool:
    """Return True if the class of the tokenizer is in the model's own code. Such a tokenizer may
    need no vocabulary file."""
    file = folder / _CONFIG
    found = json_object(file, str(file)).get("auto_map") if file.is_file() else None
    # In old files it is the list of classes, not a map to that list.
    return isinstance(found, list) or (isinstance(found, dict) and "AutoTokenizer" in found)


def is_same_tokenizer(one: Path, other: Path) -> bool:
    """Return True if two folders hold identical tokenizer files. Comparing the files takes 10 ms,
    while loading a tokenizer of 128,000 tokens takes half a second."""
    if is_gguf(one) or is_gguf(other) or not has_tokenizer(one):
        return False
    names, others = (
        {file.name for pattern in (*_FILES, *_MORE_FILES) for file in place.glob(pattern)}
        for place in (one, other)
    )
    return names == others and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names
    )


def load_tokenizer(
    place: Path, name: str, vocab_size: int, is_dummy: bool, trust_remote_code: bool = False
) -> Tokenizer:
    """Load the tokenizer of a folder or GGUF file.

    If there is none and the model has dummy weights, return a `ByteTokenizer`. Raises `SetupError`
    if there is none and the model has real weights, or if files are damaged.
    """
    if is_gguf(place):
        return _loaded(partial(gguf_tokenizer, read_model(place)), name, "the GGUF file is damaged")
    if (file := unsafe_file(place)) is not None:
        what = f"not a regular file of at most {FILE_BYTES >> 20} MiB"
        raise SetupError(f"cannot load the tokenizer of {name}: {file} is {what}", _NEEDED)
    if not has_tokenizer(place):
        if is_dummy:
            return ByteTokenizer(vocab_size)
        # For some families transformers would invent a tokenizer with an empty vocabulary.
        raise SetupError(f"cannot load the tokenizer of {name}: there is none", _NEEDED)
    if not trust_remote_code and not _has_vocabulary(place):
        raise _needs_code(name)
    for file in (file for pattern in (*_FILES, _CONFIG) for file in place.glob(pattern)):
        if is_lfs_pointer(file):
            what = f"{file.name} is a Git LFS pointer, not the file itself"
            raise SetupError(f"cannot load the tokenizer of {name}: {what}", LFS_HINT)
    from transformers import AutoTokenizer

    # Always give trust_remote_code: without it, transformers would ask on the terminal.
    load = partial(AutoTokenizer.from_pretrained, place, trust_remote_code=trust_remote_code)
    return _loaded(load, name, _NEEDED)


def _loaded(load: Callable[[], Any], name: str, hint: str) -> PretrainedTokenizer:
    """Return the tokenizer that `load` makes. Raises a `SetupError` with this hint if it fails."""

    def refusal(problem: BaseException) -> SetupError:
        if "trust_remote_code" in str(problem):
            return _needs_code(name)
        return SetupError(f"cannot load the tokenizer of {name}: {reason_of(problem)}", hint)

    with refusing(refusal, SetupError), native_lines(), redirect_stdout(sys.stderr):
        return PretrainedTokenizer(load(), name)


def _needs_code(name: str) -> SetupError:
    return SetupError(
        f"the tokenizer of {name} needs code from its own repository",
        "pass --trust-remote-code if you trust it",
    )


def at_moment(template: str, moment: datetime) -> str:
    """Put a macro `strftime_now` in front of a chat template. It replaces transformers' function of
    this name, and formats the given time instead of the current one."""
    formats = [f"%{flag}{letter}" for flag in ("", *"-_0^#") for letter in _FORMATS]
    texts = [[one, moment.strftime(one)] for one in formats]
    macro = (
        f"{{% macro {DATE_KEY}(format) %}}{{% for piece in format.split('%%') %}}"
        "{{ '%' if not loop.first }}{% set found = namespace(text=piece) %}"
        f"{{% for one, text in {texts!r} if one in piece %}}"
        "{% set found.text = found.text|replace(one, text) %}{% endfor %}"
        "{{ found.text }}{% endfor %}{% endmacro %}"
    )
    # The line break adds nothing to the rendered text: Jinja drops it after a block.
    return f"{macro}\n{template}"


def _no_template(name: str) -> SpecdecError:
    # This is a usage error and not a setup error: the model has all its files, and the user can
    # avoid the error with other options.
    return UsageError(
        f"the model {name} has no chat template",
        "take a model tuned for chat, or give plain text without --chat, --system and messages",
    )


def _template_problem(
    problem: Exception, name: str, *, is_own: bool, is_usable: bool
) -> SpecdecError:
    """Return the error to raise if a chat template cannot be rendered: `UsageError` if the messages
    or a template from the user are at fault, `SetupError` if the model's template is.

    is_own: whether the template is from the user.
    is_usable: whether the template renders other messages.
    """
    if type(problem) is TemplateError:  # the template raises it with `raise_exception`
        return UsageError(
            f"the chat template of {name} refuses these messages: {reason_of(problem)}"
        )
    hint = "the template comes with the model's tokenizer; --chat-template takes another"
    told = f"fails: {reason_of(problem)}"
    if isinstance(problem, TemplateSyntaxError):
        told = f"is damaged: line {problem.lineno}: {reason_of(problem)}"
    elif isinstance(problem, TimeoutError):
        told = f"does not end: no text after {TEMPLATE_SECONDS:g} seconds"
    elif isinstance(problem, MemoryError):
        told = "makes too long a text"
    if is_own:
        return UsageError(f"the given chat template {told}", "see --chat-template")
    if is_usable and not isinstance(problem, TemplateSyntaxError):
        return UsageError(f"the chat template of {name} {told}", _ONLY_HERE)
    return SetupError(f"the chat template of {name} {told}", hint)


def check_same_vocabulary(
    target: Tokenizer, draft: Tokenizer, names: tuple[str, str], sizes: tuple[int, int]
) -> None:
    """Raise `SetupError` unless two tokenizers have the same ids for the same tokens. The message
    names the first id for which they differ.

    names, sizes: the names and the vocabulary sizes of the target and the draft. The sizes may
    differ because of padding, but ids that belong to tokens must not be missing from the draft.
    """
    by_id = {i: t for t, i in target.vocabulary().items()}
    other = {i: t for t, i in draft.vocabulary().items()}
    if by_id == other:
        if missing := [i for i in by_id if sizes[1] <= i < sizes[0]]:
            raise SetupError(
                f"draft {names[1]} has {sizes[1]} ids, but target {names[0]} has more: id "
                f"{min(missing)} is {by_id[min(missing)]!r} in their tokenizer",
                _ANOTHER_DRAFT,
            )
        return
    first = min(i for i in by_id.keys() | other.keys() if by_id.get(i) != other.get(i))

    def named(tokens: dict[int, str]) -> str:
        return repr(tokens[first]) if first in tokens else "nothing"

    raise SetupError(
        f"target {names[0]} and draft {names[1]} have different vocabularies: id {first} is "
        f"{named(by_id)} for the target and {named(other)} for the draft",
        _ANOTHER_DRAFT,
    )
