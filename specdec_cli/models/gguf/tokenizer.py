"""The tokenizer in a GGUF file, built by transformers from the file's vocabulary.

Versions of transformers differ in which tokens they mark as special, and in which ids they add at
the beginning and end of a text, so this module sets both itself.
"""

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers

from specdec_cli.models.gguf.header import Header
from specdec_cli.models.gguf.tensors import FROM_GGUF
from specdec_cli.text import shown

# The maximum total length of all tokens. If a file has no merges, transformers derives them by
# trying all splits of every token, which is slow.
_VOCABULARY_BYTES = 1 << 25
_TOKEN_BYTES = 1 << 12
_CONTROL, _USER_DEFINED = 3, 4
_BYTE_LEVEL, _PIECES = "gpt2", "llama"  # values of tokenizer.ggml.model
# The pre-tokenizers that earlier versions of transformers support, by family.
_CUT_BEFORE = {"llama": {"smollm", "gpt-2", "default"}, "qwen2": {"qwen2", "deepseek-r1-qwen"}}
_CUT_BEFORE |= {"qwen3": {"qwen2"}, "qwen2_moe": {"qwen2"}, "qwen3_moe": {"qwen2"}}
# Pre-tokenizers (tokenizer.ggml.pre) that llama.cpp splits by GPT-2's rule (src/llama-vocab.cpp).
# Old files name none.
_AS_GPT2 = {None, "default", "gpt-2", "phi-2", "gigachat", "mpt", "olmo", "jais", "trillion"}
# Pre-tokenizers with GPT-2's rule that also split numbers into single digits.
_DIGITS_APART = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"}
# Pre-tokenizers of models that do not apply merges to a piece that is a token.
_WHOLE_PIECES = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"}
_WHOLE_PIECES |= {"lfm2", "tekken"}
# Texts of these models begin with the BOS token, even if the file does not say so.
_BEGIN_WITH_BOS = _WHOLE_PIECES
# Models with these names strip white space after special tokens, except those in _NOT_STRIPPED.
_STRIPPED = ("phi-3", "phi3")
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_TEMPLATE = "tokenizer.chat_template"
_NAMED = f"{_TEMPLATE}."  # the prefix of the keys of further templates; the names follow
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def gguf_tokenizer(header: Header) -> Any:
    """Return transformers' tokenizer for a model in a GGUF file. Raises `ValueError` if the
    vocabulary is missing or invalid."""
    from transformers import PreTrainedTokenizerFast

    values, vocabulary = header.values, _vocabulary(header)
    tokens = vocabulary["tokens"]
    settings: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        token_id = values.get(f"tokenizer.ggml.{key}")
        if token_id is not None and not (type(token_id) is int and 0 <= token_id < len(tokens)):
            raise ValueError(f"its {key} is {token_id}, but it has {len(tokens)} tokens")
        settings[name] = None if token_id is None else tokens[token_id]
    for key in ("add_bos_token", "add_eos_token"):
        settings[key] = values.get(f"tokenizer.ggml.{key}") is True
    if "tokenizer.ggml.add_bos_token" not in values:  # older files lack the key
        is_usual = vocabulary["tokenizer_type"] == _PIECES
        is_usual |= vocabulary["pre_tokenizer_type"] in _BEGIN_WITH_BOS
        settings["add_bos_token"] = is_usual and settings["bos_token"] is not None
    texts = {key: one for key, one in values.items() if isinstance(one, str)}
    named = {key.removeprefix(_NAMED): texts[key] for key in texts if key.startswith(_NAMED)}
    if (template := texts.get(_TEMPLATE)) is not None:
        settings["chat_template"] = {"default": template, **named} if named else template
    elif named:
        settings["chat_template"] = named
    architecture = str(values["general.architecture"])
    backend = _with_tokens_of_file(_backend(architecture, vocabulary), vocabulary)
    if vocabulary["tokenizer_type"] == _BYTE_LEVEL:
        _cut_as_named(backend, vocabulary["pre_tokenizer_type"])
    elif not architecture.startswith("gemma"):
        _set_spaces(backend, adds_first=vocabulary.get("add_prefix_space") is not False)
    name = str(values.get("general.name")).lower()
    _add_special(backend, vocabulary, strips=any(one in name for one in _STRIPPED))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **settings
    )
    for name in ("bos_token", "eos_token"):
        token_id, found = values.get(f"tokenizer.ggml.{name}_id"), getattr(tokenizer, f"{name}_id")
        if token_id is not None and token_id != found:
            told = f"its {name} {shown(settings[name])} would be {found}, not {token_id}"
            raise ValueError(told)
    return tokenizer


def _vocabulary(header: Header) -> dict[str, Any]:
    """Return the file's vocabulary and its settings, by the names that transformers'
    `convert_gguf_tokenizer` uses. Raises `ValueError` if the vocabulary is missing or invalid."""
    try:
        from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING as table
    except ImportError:  # earlier versions of transformers
        from transformers.integrations.ggml import GGUF_TOKENIZER_MAPPING as table
    found = {
        name: header.values[f"tokenizer.{key}"]
        for key, name in table["tokenizer"].items()
        if f"tokenizer.{key}" in header.values
    }
    found["pre_tokenizer_type"] = header.values.get("tokenizer.ggml.pre")
    tokens = found.get("tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ValueError("there is none in the GGUF file")
    if len(set(tokens)) < len(tokens):
        raise ValueError("its vocabulary has a token twice")
    if (kind := found.get("tokenizer_type")) not in (_BYTE_LEVEL, _PIECES):
        raise ValueError(
            f"its kind is {shown(kind)}; only {_BYTE_LEVEL} and {_PIECES} are supported"
        )
    longest = max(map(len, tokens))
    if longest > _TOKEN_BYTES or sum(map(len, tokens)) > _VOCABULARY_BYTES:
        raise ValueError(
            f"its longest token has {longest} characters and all its tokens have "
            f"{sum(map(len, tokens))}; the limits are {_TOKEN_BYTES} and {_VOCABULARY_BYTES}"
        )
    for key in ("scores", "token_type"):
        if key in found and (not isinstance(found[key], list) or len(found[key]) != len(tokens)):
            raise ValueError(f"{key} is not a list of {len(tokens)} entries, one per token")
    return found


def _backend(architecture: str, vocabulary: dict[str, Any]) -> Any:
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer
    except ImportError:
        from transformers.integrations.ggml import convert_gguf_tokenizer

        architecture = FROM_GGUF[architecture]
        if vocabulary["tokenizer_type"] == _PIECES or (
            vocabulary.get("pre_tokenizer_type") not in _CUT_BEFORE.get(architecture, set())
        ):
            raise ValueError(
                "this version of transformers does not split text as the model expects; 5.23 and "
                "later do"
            ) from None
        vocabulary.setdefault("add_prefix_space", False)
    else:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        # In place of a pre-tokenizer that it does not know, transformers would use GPT-2's.
        named = vocabulary["pre_tokenizer_type"]
        known = {*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_DIGITS_APART}
        if vocabulary["tokenizer_type"] == _BYTE_LEVEL and named not in known:
            raise ValueError(f"its pre-tokenizer {shown(named)} is not supported")
    backend, _ = convert_gguf_tokenizer(architecture, dict(vocabulary))
    return backend


def _cut_as_named(backend: Any, named: str | None) -> None:
    """Set the parts of a byte-level tokenizer's splitting rule that transformers leaves out.

    named: the name of the pre-tokenizer in the file.
    """
    if named in _DIGITS_APART:
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if named in _WHOLE_PIECES:
        backend.model.ignore_merges = True


def _set_spaces(backend: Any, *, adds_first: bool) -> None:
    """Set how a SentencePiece tokenizer represents spaces.

    adds_first: whether to add a space at the beginning of a text and after each special token, as
    in llama.cpp. Decoding then removes the first one.
    """
    first = [normalizers.Prepend("▁")] if adds_first else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", int(adds_first), 0)])


def _with_tokens_of_file(backend: Any, vocabulary: dict[str, Any]) -> Any:
    """Return the tokenizer with the file's tokens, and no others.

    transformers spells a token by its bytes if it has characters outside the byte-level alphabet.
    But special tokens, such as `<｜User｜>`, occur in texts as the file spells them, and their
    bytes may spell another token, such as `ĠĠ`. transformers also adds special tokens that the
    model does not have, such as `<|endoftext|>`.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelling, known, tokens = bytes_to_unicode(), backend.get_vocab(), vocabulary["tokens"]
    ids = {token: token_id for token, token_id in known.items() if token_id < len(tokens)}
    if vocabulary["tokenizer_type"] == _BYTE_LEVEL:
        kinds, alphabet = vocabulary.get("token_type") or [None] * len(tokens), {*spelling.values()}
        ids = {
            token
            if kind in (_CONTROL, _USER_DEFINED) or alphabet.issuperset(token)
            else "".join(spelling[byte] for byte in token.encode()): token_id
            for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        }
    if ids == known:
        return backend
    made = json.loads(backend.to_str())
    made["model"]["vocab"] = ids
    made["added_tokens"] = [one for one in made["added_tokens"] if one["content"] in ids]
    return Tokenizer.from_str(json.dumps(made))


def _add_special(backend: Any, vocabulary: dict[str, Any], *, strips: bool) -> None:
    """Mark control tokens as special, and user-defined tokens as tokens that are never split.

    strips: whether a text loses the white space after them, as in llama.cpp for Phi-3.
    """
    known = backend.get_vocab()
    kinds = vocabulary.get("token_type") or ()
    marked = {_CONTROL: [], _USER_DEFINED: []}  # type: dict[int, list[AddedToken]]
    for token, kind in zip(vocabulary["tokens"], kinds, strict=False):
        if kind in marked and token in known:
            rest = {"special": kind == _CONTROL, "rstrip": strips and token not in _NOT_STRIPPED}
            marked[kind].append(AddedToken(token, normalized=False, **rest))
    backend.add_special_tokens(marked[_CONTROL])
    backend.add_tokens(marked[_USER_DEFINED])
