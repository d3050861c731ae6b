"""Text to ids and back, and whether two models speak of the same ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from specdec_cli.errors import SetupError


class Tokenizer(Protocol):
    """What commands need of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def vocabulary(self) -> dict[str, int]: ...


class PretrainedTokenizer:
    """transformers' tokenizer of a model folder; adds the special tokens that it is set to add."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary


class ByteTokenizer:
    """Stands in where a config-only folder has no tokenizer: UTF-8 bytes are the ids.

    Only for dummy weights, whose output means nothing anyway.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [byte % self._vocab_size for byte in text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in token_ids)

    def vocabulary(self) -> dict[str, int]:
        return {}


def load_tokenizer(
    folder: Path, name: str, vocab_size: int, is_dummy: bool, trust_remote_code: bool = False
) -> Tokenizer:
    """The tokenizer in `folder`. Raises `SetupError` when there is none and weights are real."""
    has_files = any(
        (folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")
    ) or (any(folder.glob("*.model")) or (folder / "vocab.json").is_file())
    if not has_files and is_dummy:
        return ByteTokenizer(vocab_size)
    from transformers import AutoTokenizer

    try:
        # Left unsaid, transformers asks on the terminal whether to run a repository's code.
        return PretrainedTokenizer(
            AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        )
    except Exception as problem:
        if "trust_remote_code" in str(problem):
            raise SetupError(
                f"the tokenizer of {name} needs code from its own repository",
                "pass --trust-remote-code if you trust it",
            ) from None
        reason = (str(problem).splitlines() or [type(problem).__name__])[0][:200]
        raise SetupError(
            f"cannot load the tokenizer of {name}: {reason}",
            "the model folder needs its tokenizer files (tokenizer.json)",
        ) from None


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, names: tuple[str, str]) -> None:
    """Refuse a pair whose tokenizers give a token different ids.

    Sizes of the logits may differ by padding; the ids that stand for text may not. Raises
    `SetupError` naming the first id that differs.
    """
    by_id = {i: t for t, i in target.vocabulary().items()}
    other = {i: t for t, i in draft.vocabulary().items()}
    if by_id == other:
        return
    first = min(i for i in by_id.keys() | other.keys() if by_id.get(i) != other.get(i))

    def shown(tokens: dict[int, str]) -> str:
        return repr(tokens[first]) if first in tokens else "nothing"

    raise SetupError(
        f"target {names[0]} and draft {names[1]} have different vocabularies: id {first} is "
        f"{shown(by_id)} for the target and {shown(other)} for the draft",
        "a draft must share its target's tokenizer; take one of the same family",
    )
