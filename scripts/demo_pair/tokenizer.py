"""Train the demo pair's byte-level BPE. Knows nothing of models.

A run of newlines and a run of spaces are separate tokens, never merged with punctuation. A prompt
may therefore end before or after a newline and is still tokenised like the training text. Merging
them would save 5 % of the tokens.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import SEED, Doc, read
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
EOS = "<|endoftext|>"
CONTEXT = 2048
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n+| {2,}| |\s"
SAMPLE = {"stdlib": 3.0, "manual": 0.5, "stdlib-test": 0.3}
PACKAGES = 0.25

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": EOS,
    "eos_token": EOS,
    "pad_token": EOS,
    "unk_token": None,
    "add_bos_token": False,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONTEXT,
}


def blank() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sample(docs: list[Doc]) -> Iterator[str]:
    """The tokenizer's training text: each group's share, whole repeats first."""
    rng = random.Random(SEED)
    for doc in docs:
        share = SAMPLE.get(doc.group, PACKAGES)
        for _ in range(int(share) + (rng.random() < share % 1)):
            yield doc.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".corpus"))
    args = parser.parse_args()
    tokenizer = blank()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(read(args.work / "docs.jsonl")), trainer)
    if tokenizer.get_vocab_size() != VOCAB or tokenizer.token_to_id(EOS) != 0:
        raise ValueError("the corpus is too small for the vocabulary")
    out = args.work / "pack" / "tokenizer"
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    texts = [doc.text for doc in read(args.work / "heldout.jsonl")]
    tokens = [tokenizer.encode(text).ids for text in texts]
    same = all(
        tokenizer.decode(ids, skip_special_tokens=False) == text
        for ids, text in zip(tokens, texts, strict=True)
    )
    size = sum(len(text.encode()) for text in texts) / sum(map(len, tokens))
    print(f"held-out bytes per token {size:.3f}, round trip {same}")


if __name__ == "__main__":
    main()
