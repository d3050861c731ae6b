"""Text from growing token lists: no character is split, none is lost, and stops are found."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdec_cli.core.detokenize import (
    Decoder,
    StopFinder,
    TextStream,
    cut_at_stop,
    text_before,
)
from specdec_cli.models.tokenizer import PretrainedTokenizer

CORPUS = ["the cat sat on the mat", "naïve café, 日本語 テキスト", "emoji 😀😃 and ünïcödé"] * 3
# Characters of 1, 2, 3 and 4 bytes, some in the corpus and some not.
ALPHABET = "the cat éïß 日本語漢字 😀🎉🧵\n"


class Pieces:
    """Decoder over a fixed list of pieces: id i is piece i."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in token_ids)


class Trained:
    """Decoder over a tokenizer of the tokenizers library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


@cache
def byte_level() -> Trained:
    """Byte-level BPE (gpt2, llama 3, qwen): a character may be spread over four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return Trained(tokenizer)


@cache
def byte_fallback() -> Trained:
    """Metaspace BPE with byte tokens (llama 2, mistral): unknown characters are spelt in bytes."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": 1 + b for b in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz", "é"]:
        vocab[piece] = len(vocab)
    merges = []
    for pair in (("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("c", "a"), ("ca", "t")):
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return Trained(tokenizer)


TOKENIZERS = {"byte-level": byte_level, "byte-fallback": byte_fallback}


def stream(decoder: Decoder, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
    text_stream = TextStream(decoder, prompt)
    return [text_stream.feed(t) for t in output]


def keep_by_hand(decoder: Decoder, output: list[int], stop: tuple[str, ...]) -> int | None:
    """The length of the shortest prefix of the output whose text holds a stop string."""
    for count in range(1, len(output) + 1):
        if any(s in decoder.decode(output[:count]) for s in stop):
            return count
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(before=st.text(ALPHABET, max_size=20), after=st.text(ALPHABET, min_size=1, max_size=40))
def test_pieces_are_the_decode_of_everything(name: str, before: str, after: str) -> None:
    tokenizer = TOKENIZERS[name]()
    prompt = tokenizer.encode(before)
    ids = tokenizer.encode(before + after)
    # The rest can continue a prompt only if the prompt's tokens are a prefix of the whole.
    shared = 0
    while shared < min(len(prompt), len(ids)) and prompt[shared] == ids[shared]:
        shared += 1
    while shared and tokenizer.decode(ids[:shared]).endswith("\ufffd"):
        shared -= 1
    pieces = stream(tokenizer, ids[:shared], ids[shared:])
    assert tokenizer.decode(ids[:shared]) + "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces), "a character was split"


def test_the_byte_level_tokenizer_splits_characters() -> None:
    """Without such splits the tests above would show little."""
    tokenizer = byte_level()
    assert len(tokenizer.encode("🧵")) >= 3
    assert len(tokenizer.encode("漢")) >= 2
    assert len(byte_fallback().encode("漢")) == 4, "a space and three bytes"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("char", ["é", "ß", "漢", "🧵"])
def test_long_runs_of_multi_byte_characters(name: str, char: str) -> None:
    """The decoded window moves on, and must not start inside a character."""
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(char * 40 + "x")
    pieces = stream(tokenizer, [], ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert sum(map(len, pieces[: len(pieces) // 2])) >= 15, "text comes as it is written"
    for shared in range(1, 60):
        if not tokenizer.decode(ids[:shared]).endswith("\ufffd"):
            pieces = stream(tokenizer, ids[:shared], ids[shared:])
            assert tokenizer.decode(ids[:shared]) + "".join(pieces) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 299), max_size=5), max_size=8))
def test_bytes_that_are_no_text_do_not_disturb_what_follows(chunks: list[list[int]]) -> None:
    """Random ids hold invalid UTF-8, which shows as replacement characters, once each."""
    tokenizer = byte_level()
    (plain,) = tokenizer.encode("x")
    size = tokenizer.tokenizer.get_vocab_size()
    ids = [t for chunk in chunks for t in [*(i % size for i in chunk), plain]]
    assert "".join(stream(tokenizer, [], ids)) == tokenizer.decode(ids)


def test_a_real_replacement_character_is_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a\ufffdb")
    assert "".join(stream(tokenizer, [], ids)) == "a\ufffdb"


def test_text_is_not_held_back_for_ever() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("\ufffd" * 100)
    assert len("".join(stream(tokenizer, [], ids))) >= 50


def test_space_before_a_word_comes_from_the_context() -> None:
    tokenizer = byte_fallback()
    the = tokenizer.encode("the")
    assert tokenizer.decode(the) == "the"
    assert "".join(stream(tokenizer, the, the)) == " the"


PIECES = Pieces("a", "b", "ab", "bab", "STOP", "xSTOPy", "ST", "OP", " ", "")


@pytest.mark.parametrize(
    ("prompt", "output", "stop", "want"),
    [
        ([0], [0, 4, 1], ("STOP",), 2),
        ([0], [0, 5, 1], ("STOP",), 2),
        ([0], [1, 6, 7, 1], ("STOP",), 3),
        ([0], [4], ("STOP",), 1),
        ([], [4], ("STOP",), 1),
        ([4], [0, 1], ("STOP",), None),
        ([6], [7, 1, 1], ("STOP",), None),
        ([6], [7, 6, 7], ("STOP",), 3),
        ([0, 1], [0, 0], ("ba",), None),
        ([0, 1], [0, 1, 0], ("ba",), 3),
        ([0], [1, 1, 0], ("zz", "ba", "bba"), 3),
        ([0], [2, 0], ("b", "ab"), 1),
        ([0], [6, 9, 9, 7], ("STOP",), 4),
        ([0], [1, 1, 1], ("b",), 1),
        ([0], [0, 0, 0], ("b",), None),
    ],
    ids=[
        "whole-token",
        "inside-a-token",
        "across-tokens",
        "first-token",
        "no-prompt",
        "in-the-prompt",
        "begins-in-the-prompt",
        "after-one-that-begins-in-the-prompt",
        "short-one-begins-in-the-prompt",
        "short-one-after-the-prompt",
        "several",
        "first-of-two",
        "across-empty-tokens",
        "one-character",
        "absent",
    ],
)
@pytest.mark.parametrize("feed", [1, 2, 99])
def test_stop(
    prompt: list[int], output: list[int], stop: tuple[str, ...], want: int | None, feed: int
) -> None:
    """The result does not depend on the number of tokens that arrive at once."""
    finder = StopFinder(PIECES, prompt, stop)
    done = 0
    found = None
    while done < len(output) and found is None:
        chunk = output[done : done + feed]
        kept = finder.feed(chunk)
        found = None if kept is None else done + kept
        done += len(chunk)
    assert found == want


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=10),
    output=st.lists(st.integers(0, 3), max_size=25),
    stop=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 6), min_size=25, max_size=25),
)
def test_stop_against_a_search_of_the_whole_text(
    prompt: list[int], output: list[int], stop: list[str], cuts: list[int]
) -> None:
    finder = StopFinder(PIECES, prompt, tuple(stop))
    done, found = 0, None
    for size in cuts:
        if done >= len(output) or found is not None:
            break
        kept = finder.feed(output[done : done + size])
        found = None if kept is None else done + kept
        done += size
    assert found == keep_by_hand(PIECES, output, tuple(stop))


@pytest.mark.parametrize("stop", ["🧵", "字", "é 漢", "x🎉", "语", "\n\n"])
def test_stop_of_characters_that_are_spread_over_tokens(stop: str) -> None:
    tokenizer = byte_level()
    for before in ("", "the cat 日本 ", "😀" * 12):
        ids = tokenizer.encode(before + stop + " and on it goes")
        finder = StopFinder(tokenizer, tokenizer.encode("漢字 x"), (stop,))
        want = keep_by_hand(tokenizer, ids, (stop,))
        assert want is not None
        assert finder.feed(ids) == want
        assert stop in tokenizer.decode(ids[:want])


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("one two", (), "one two"),
        ("one two", ("x",), "one two"),
        ("one two", ("two",), "one "),
        ("one two", ("two", "ne"), "o"),
        ("aXbX", ("X",), "a"),
        ("X", ("X",), ""),
    ],
)
def test_cut_at_stop(text: str, stop: tuple[str, ...], want: str) -> None:
    assert cut_at_stop(text, stop) == want


@pytest.mark.parametrize(
    ("name", "prompt", "stop", "want"),
    [
        ("byte-fallback", "cat", (" the", "he"), ""),
        ("byte-fallback", "cat", ("he", " the"), ""),
        ("byte-fallback", "cat", (" the",), ""),
        ("byte-fallback", "cat", ("he", " cat"), "t"),
        ("byte-fallback", "cat", (" cat",), "the"),
        ("byte-fallback", "", (" the", "he"), "t"),  # nothing before it keeps the space
        ("byte-level", "cat", (" the", "he"), ""),
        ("byte-level", "cat", ("he", " cat"), " t"),
    ],
)
def test_text_before_the_first_stop(
    name: str, prompt: str, stop: tuple[str, ...], want: str
) -> None:
    """A stop string may begin with the first space of an answer, which a tokenizer may drop."""
    made = TOKENIZERS[name]().tokenizer
    tokenizer = PretrainedTokenizer(PreTrainedTokenizerFast(tokenizer_object=made), name)
    before, ids = tokenizer.encode(prompt), tokenizer.encode(" the cat")
    count = StopFinder(tokenizer, before, stop).feed(ids)
    assert count is not None and text_before(tokenizer, before, ids[:count], stop) == want


def test_a_word_that_begins_without_a_space_is_no_stop_string_with_one() -> None:
    made = byte_fallback().tokenizer
    tokenizer = PretrainedTokenizer(PreTrainedTokenizerFast(tokenizer_object=made), "m")
    before, (_, ids) = tokenizer.encode("the"), tokenizer.encode("cat")
    assert text_before(tokenizer, before, [ids], (" cat", "at")) == "c"
