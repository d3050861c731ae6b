"""A tiny target and an EAGLE-3 head that was trained for it, as checkpoints, and their rounds."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from tests.cli.generate_helpers import word_tokenizer
from tests.eagle3 import Head, Reference, save_head
from tests.engine.test_formats import compressed, describe_as, words
from tests.support import FAMILIES, VOCAB, greedy_reference, greedy_text, reference, save_tiny

NEW_TOKENS = 24
PROMPTS = [[5, 9, 3, 11, 60], [7, 30], [4, 8, 15, 16, 23, 42, 50, 61, 12, 90, 33], [44, 2, 71, 6]]


class Pair(NamedTuple):
    """The folders of a target and of a head, and the head itself."""

    target: Path
    folder: Path
    head: Head


def save_pair(
    folder: Path,
    family: str = "llama",
    dialect: str = "speculators",
    lends_head: bool = False,
    steps: int = 150,
    **more: Any,
) -> Pair:
    """A target of four layers, and a head, trained for `steps`, that borrows its embedding.

    lends_head: whether it borrows the target's head too. more: of the head.
    """
    changes: dict[str, Any] = {"num_hidden_layers": 4}
    if types := FAMILIES[family].get("layer_types"):
        changes["layer_types"] = types * 2
    target = save_tiny(folder / "target", family, **changes)
    word_tokenizer(target, [f"w{i}" for i in range(VOCAB)])
    oracle = reference(target)
    # The head never sees the last text.
    texts = [p + greedy_reference(oracle, p, NEW_TOKENS + 8) for p in PROMPTS[:-1]]
    sizes = {"hidden": 64, "target_hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
    head = Head(**sizes, **({"outputs": (0, 1, 2)} | more))
    embedding = {"embed_tokens.weight": oracle.get_input_embeddings().weight.detach().clone()}
    head.tensors.update(embedding)
    fixed: tuple[str, ...] = ()
    if lends_head:
        fixed = ("lm_head.weight",)
        head.tensors[fixed[0]] = oracle.get_output_embeddings().weight.detach().clone()
    head = trained(head, oracle, texts, steps, fixed)
    head = replace(head, tensors=head.tensors | embedding)
    saved = save_head(folder / "head", head, dialect, without=("embed_tokens.weight", *fixed))
    return Pair(target, saved, head)


def in_bits(pair: Pair, folder: Path, bits: int) -> tuple[Pair, Path]:
    """A pair with the target in 8 bits, in blocks as transformers has them, or in 4, in groups, for
    which the head was trained further; and a folder with that target's numbers."""
    kept, plain = (Path(shutil.copytree(pair.target, folder / name)) for name in ("kept", "plain"))
    tensors = load_file(kept / "model.safetensors")
    numbers = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        matrix, stem = tensors.pop(name), name.removesuffix(".weight")
        if bits == 8:
            blocks = matrix.unflatten(1, (-1, 32)).unflatten(0, (-1, 16))
            scales = blocks.abs().amax((1, 3)) / 448
            each = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
            codes = (matrix / each).to(torch.float8_e4m3fn)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            numbers[name] = codes.float() * each
            continue
        scales = matrix.unflatten(1, (-1, 32)).abs().amax(2).bfloat16() / 7
        each = scales.float().repeat_interleave(32, 1)
        rounded = (matrix / each).round().clamp(-8, 7)
        tensors |= {f"{stem}.weight_packed": words(rounded.long() + 8, 4)}
        tensors |= {
            f"{stem}.weight_scale": scales,
            f"{stem}.weight_shape": torch.tensor(each.shape),
        }
        numbers[name] = rounded * each
    four = compressed("pack-quantized", 4, "group", group_size=32)
    eight = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    save_file(tensors, kept / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    describe_as(kept, eight if bits == 8 else four)
    oracle = reference(plain)
    texts = [p + greedy_reference(oracle, p, NEW_TOKENS + 8) for p in PROMPTS[:-1]]
    head = trained(pair.head, oracle, texts, 50, ("embed_tokens.weight",))
    saved = save_head(folder / "head", head, "speculators", without=("embed_tokens.weight",))
    return Pair(kept, saved, head), plain


def trained(
    head: Head, oracle: Any, texts: list[list[int]], steps: int, fixed: tuple[str, ...] = ()
) -> Head:
    """The head, trained on `texts` to propose four tokens, so that some are accepted.

    fixed: weights that stay as they are.
    """
    kept = ("d2t", *fixed)
    with torch.inference_mode(False):
        tensors = {n: t.clone().requires_grad_(n not in kept) for n, t in head.tensors.items()}
        weights = [t for t in tensors.values() if t.requires_grad]
        plain = Reference(replace(head, tensors=tensors))
        own_ids = torch.full((head.vocab,), -100)  # tokens that it cannot propose teach nothing
        own_ids[head.ids] = torch.arange(head.draft_vocab)
        adam = torch.optim.Adam(weights, lr=3e-3)
        inputs = [states(oracle, head, text) for text in texts]
        for step in range(steps):
            text, features = texts[step % len(texts)], inputs[step % len(texts)]
            # Every row's first proposal, and a chain of three more from one place.
            given, following = plain.fuse(features[:-2]), torch.tensor(text[1:-1])
            goals = own_ids[torch.tensor(text)]
            loss = cross_entropy(plain.logits(plain.rows(given, following)), goals[2:])
            n = 3 + 7 * step % (len(text) - 8)
            given, following = given[: n - 1], following[: n - 1]
            for place in range(n, n + 4):
                out = plain.rows(given, following)[-1:]
                if goals[place] >= 0:
                    loss = loss + cross_entropy(plain.logits(out), goals[place : place + 1])
                given = torch.cat((given, out))
                following = torch.tensor(text[1 : place + 1])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    return replace(head, tensors={n: t.detach() for n, t in tensors.items()})


def states(oracle: Any, head: Head, tokens: list[int]) -> torch.Tensor:
    """Features [T, F] by transformers."""
    with torch.no_grad():
        out = oracle(torch.tensor([tokens]), output_hidden_states=True)
    return torch.cat([out.hidden_states[i + 1][0] for i in head.outputs], dim=1)


def expected_rounds(
    target: Path, head: Head, prompt: list[int], k: int | Iterator[int]
) -> list[tuple[int, int]]:
    """(proposed, accepted) of each round of greedy decoding, without any cache.

    k: of every round, or of each. Rounds without proposals are left out.
    """
    lengths = repeat(k) if isinstance(k, int) else k
    oracle, plain = reference(target), Reference(head)
    text = prompt + greedy_text(target, prompt, NEW_TOKENS)
    features, found, n = states(oracle, head, text), [], len(prompt)
    while n < len(text):
        count, stand = min(next(lengths), len(text) - n - 1), 0
        if count:
            proposed, _ = plain.chain(features[: n - 1], text[:n], count)
            stand = next((i for i in range(count) if proposed[i] != text[n + i]), count)
            found.append((count, stand))
        n += stand + 1
    return found
