"""Tiny targets with trained MTP modules in their files, and transformers' rounds with them."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import modeling_layers
from transformers.generation import candidate_generator
from transformers.modeling_layers import MtpModel

from tests.cli.generate_helpers import word_tokenizer
from tests.support import (
    Saved,
    _generate,
    greedy_reference,
    greedy_text,
    reference,
    save_tiny,
    saved,
)

NEW_TOKENS = 24
# MiMo's names of what transformers names otherwise.
_MIMO = {"post_norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
_MIMO |= {"sinks": "attention_sink_bias"}
STARTS = [[5, 9, 3, 11, 60], [7, 30], [4, 8, 15, 16, 23, 42, 50, 61, 12, 90, 33], [44, 2, 71, 6]]


class ModulesOfTarget(MtpModel):
    """MiMo's modules: each reads the target's hidden states. transformers has no names for them."""

    def forward_layer(self, index: int, hidden: torch.Tensor, *args: Any, **more: Any) -> Any:
        if index == 0:
            self.states = hidden
        return super().forward_layer(index, self.states[:, : hidden.shape[1]], *args, **more)

    @classmethod
    def from_pretrained(cls, oracle: Any, *_: Any, **__: Any) -> Any:
        found = cls(oracle, oracle.config.num_mtp_layers)
        tensors = load_file(Path(oracle.config.name_or_path) / "model.safetensors")
        for name, held in found.state_dict().items():
            if name.startswith("layers."):
                held.copy_(tensors[_mimo_name(name)])
        return found.eval()


def _mimo_name(name: str) -> str:
    place = f"model.mtp.{name.replace('mtp_block.', '')}"
    return ".".join(_MIMO.get(step, step) for step in place.split("."))


def _modules_class(oracle: Any, count: int) -> type[MtpModel]:
    """The class of the oracle's modules. MiMo's config does not tell that it has any."""
    if oracle.config.model_type != "mimo_v2_flash":
        return MtpModel
    oracle.config.num_mtp_layers = count
    oracle.config.mtp_layer_types = ["sliding_attention"] * count
    oracle.config.mtp_mlp_layer_types = ["dense"] * count
    return ModulesOfTarget


def save_mtp(
    folder: Path, family: str = "glm4_moe", count: int = 1, steps: int = 14, **changes: Any
) -> Path:
    """A target of two layers with `count` modules, trained a little on some of its texts."""
    key = "num_mtp_layers" if family == "mellum" else "num_nextn_predict_layers"
    if family != "mimo_v2_flash":
        changes = {key: count, **changes}
    target = save_tiny(folder, family, **changes)
    oracle = reference(target)
    word_tokenizer(target, [f"w{i}" for i in range(oracle.config.vocab_size)])
    torch.manual_seed(5)
    modules = _modules_class(oracle, count)(oracle, count)
    for name, tensor in [*modules.named_parameters(), *modules.named_buffers()]:
        if "layers." not in name:
            tensor.requires_grad_(False)
        elif tensor.dim() > 1:
            # Of MiMo's modules attention decides enough that rounds show sinks and window.
            is_wide = family == "mimo_v2_flash" and ".self_attn." in name
            torch.nn.init.normal_(tensor, std=0.3 if is_wide else 0.1)
        elif tensor.is_floating_point():
            is_sink = name.endswith("sinks")  # transformers leaves sinks in memory as it was
            with torch.no_grad():
                start = torch.full_like(tensor, 3.0) if is_sink else tensor
                tensor.copy_(start + torch.randn_like(tensor) * 0.2)
    if steps:
        texts = [p + greedy_reference(oracle, p, NEW_TOKENS + 8) for p in STARTS[:-1]]
        _train(modules.float(), oracle, texts, steps)
    file = target / "model.safetensors"
    tensors = load_file(file) | stored(modules, family, int(oracle.config.num_hidden_layers))
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def _train(modules: Any, oracle: Any, texts: list[list[int]], steps: int) -> None:
    weights = [p for p in modules.parameters() if p.requires_grad]
    adam = torch.optim.Adam(weights, lr=3e-3)
    with torch.inference_mode(False), torch.enable_grad():
        for step in range(steps):
            text = torch.tensor([texts[step % len(texts)]])
            with torch.no_grad():
                hidden = oracle(text, output_hidden_states=True).hidden_states[-1]
            hidden, loss = hidden.clone(), torch.zeros(())
            for index in range(len(modules.layers)):
                # Row t embeds token t + 1 + index and predicts the one after.
                rows = text.shape[1] - 2 - index
                places = torch.arange(rows)[None] + 1 + index
                embedded = text[:, 1 + index : 1 + index + rows]
                hidden = modules.forward_layer(
                    index, hidden[:, :rows], places, None, input_ids=embedded
                )
                loss = loss + cross_entropy(modules.shared_head(hidden)[0], text[0, 2 + index :])
            adam.zero_grad()
            loss.backward()
            adam.step()


def stored(modules: Any, family: str, num_layers: int) -> dict[str, torch.Tensor]:
    """The modules' tensors under the names that published files give them."""
    found = {}
    for name, tensor in modules.state_dict().items():
        if not name.startswith("layers."):
            continue
        if family == "mimo_v2_flash":
            found[_mimo_name(name)] = tensor
            continue
        _, index, *rest = name.split(".")
        own = ".".join(rest).removeprefix("mtp_block.")
        names = {"post_norm.weight": "shared_head.norm.weight"}
        prefix, outer = f"model.layers.{num_layers + int(index)}.", names.get(own, own)
        if family == "mellum":
            fields = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding"}
            fields |= {"hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
            head, _, leaf = own.partition(".")
            prefix = "mtp." if head in fields else f"mtp.layers.{index}."
            outer = f"{fields.get(head, head)}.{leaf}"
        if own.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                place = prefix + outer.replace("gate_up_proj", str(e))
                found |= {f"{place}.gate_proj.weight": gate, f"{place}.up_proj.weight": up}
        elif own.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                found[prefix + outer.replace("down_proj", f"{e}.down_proj.weight")] = down
        else:
            found[prefix + outer] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def _oracle(target: Path, count: int) -> Any:
    """transformers' model, told where its modules are: it knows the sizes of published ones."""
    oracle = reference(target)
    last = oracle.config.num_hidden_layers
    numbers = "|".join(str(last + i) for i in range(count))
    pattern = r"^mtp\." if oracle.config.model_type == "mellum" else rf"layers\.(?:{numbers})\."
    if oracle.config.model_type != "mellum":
        # It takes a pattern's first number for that of a layer.
        pattern = "|".join(rf"model\.layers\.{last + i}\..*" for i in range(count))
    oracle._keys_to_ignore_on_load_unexpected = [pattern]
    return oracle


def mtp_rounds(target: Path, start: list[int], count: int = 1) -> tuple[list[int], list[int]]:
    """transformers' own generation with the modules: the new tokens, and those that each round
    accepted. Its first pass, which proposes nothing, is left out of the rounds."""
    return _mtp_rounds(saved(target), tuple(start), count)


@cache
def _mtp_rounds(
    checkpoint: Saved, start: tuple[int, ...], count: int
) -> tuple[list[int], list[int]]:
    accepted: list[int] = []
    kind = candidate_generator.MTPCandidateGenerator
    get = kind.get_candidates

    def get_candidates(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        if not more["is_first_iteration"]:
            accepted.append(int(more["n_last_matches"]))
        return get(self, input_ids, **more)

    oracle = _oracle(checkpoint.folder, count)
    modules = patch.object(modeling_layers, "MtpModel", _modules_class(oracle, count))
    with patch.object(kind, "get_candidates", get_candidates), modules:
        tokens = _generate(oracle, list(start), NEW_TOKENS, eos_token_id=None, use_mtp=True)
    return tokens, accepted[1:]


def expected_rounds(target: Path, prompt: list[int], k: int) -> list[tuple[int, int]]:
    """(proposed, accepted) of each round of greedy decoding with one module, which reads its own
    output after the first proposal; by transformers' layer, without any cache."""
    return _expected_rounds(saved(target), tuple(prompt), k)


@cache
def _expected_rounds(checkpoint: Saved, start: tuple[int, ...], k: int) -> list[tuple[int, int]]:
    target, prompt = checkpoint.folder, list(start)
    oracle = _oracle(target, 1)
    modules = _modules_class(oracle, 1).from_pretrained(oracle)
    found, n = [], len(prompt)
    text = prompt + greedy_text(target, prompt, NEW_TOKENS - 1)
    with torch.no_grad():
        states = oracle(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
        while n < len(text):
            count, hidden, tokens = min(k, len(text) - n - 1), states[:, : n - 1], text[1:n]
            proposed: list[int] = []
            for _ in range(count):
                places = torch.arange(len(tokens))[None]
                embedded = torch.tensor([tokens])
                out = modules.forward_layer(0, hidden, places, None, input_ids=embedded)
                proposed.append(int(modules.shared_head(out[0, -1]).argmax()))
                hidden, tokens = torch.cat((hidden, out[:, -1:]), 1), [*tokens, proposed[-1]]
            stand = next((i for i in range(count) if proposed[i] != text[n + i]), count)
            if count:
                found.append((count, stand))
            n += stand + 1
    return found


def rows_of(target: Path, text: list[int], count: int) -> tuple[Any, list[Any]]:
    """The target's hidden states [T, H] along `text`, and each module's rows, by transformers'
    layers, without any cache: as many as the text has tokens for."""
    oracle = _oracle(target, count)
    modules, found = _modules_class(oracle, count).from_pretrained(oracle), []
    with torch.no_grad():
        states = oracle(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
        hidden = states
        for index in range(count):
            embedded = torch.tensor([text[1 + index :]])
            rows = embedded.shape[1]
            places = torch.arange(rows)[None] + 1 + index
            hidden = modules.forward_layer(
                index, hidden[:, :rows], places, None, input_ids=embedded
            )
            found.append(hidden[0])
    return states[0], found
