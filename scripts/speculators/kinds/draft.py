"""A standalone draft of the target's family: a few layers between embedding and head.

It begins as the target's first layers and learns the target's distributions. It uses the target's
embedding and head, which are not stored: run it with `draft.share: [embeddings, lm_head]`.
"""

import shutil
from pathlib import Path

import torch
from torch import Tensor

from scripts.speculators.features import write
from scripts.speculators.kinds.base import Kind, Link, Options, chained
from scripts.speculators.target import Reading, Target, forward, logit_scale, smaller_model

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
             "special_tokens_map.json", "generation_config.json")  # fmt: skip

OPTIONS = ("depth", "blank")


class Draft(Kind):
    """A draft in training."""

    name = "draft"
    fade = 1.0
    num_links = 1

    def __init__(self, target: Target, options: Options) -> None:
        self.scale = logit_scale(target.config)
        self.whole = smaller_model(target.config, options.depth)
        decoder = self.whole.get_decoder()
        if not options.blank:
            source = target.module.get_decoder()
            # The first layers begin at a lower loss than a mixture of first and last layers, and
            # learn faster.
            for layer, theirs in zip(decoder.layers, source.layers, strict=False):
                layer.load_state_dict({n: t.float() for n, t in theirs.state_dict().items()})
            decoder.norm.load_state_dict(
                {n: t.float() for n, t in source.norm.state_dict().items()}
            )
        # The borrowed weights are the target's tensors, not parameters of the draft.
        decoder.embed_tokens = target.module.get_input_embeddings()
        self.whole.lm_head = None
        self.decoder = decoder
        self.module = torch.nn.ModuleDict({"layers": decoder.layers, "norm": decoder.norm})

    def prepare(self, reading: Reading) -> None:
        self.decoder.rotary_emb.to(reading.rows.ids.device)

    def links(self, reading: Reading, generator: torch.Generator) -> list[Link]:
        rows = reading.rows
        found = forward(self.decoder, rows.ids, rows.position, reading.layout.attend)
        return chained([self.scale * found.last_hidden_state.flatten(0, 1)], rows, 0)

    @torch.no_grad()
    def save(self, target: Target, ranked: Tensor, folder: Path) -> None:
        prefix = self.whole.base_model_prefix
        tensors = {f"{prefix}.{n}": t for n, t in self.module.state_dict().items()}
        config = self.whole.config.to_dict()
        config |= {"architectures": list(target.config.architectures or []), "dtype": "bfloat16"}
        for key in ("_attn_implementation", "_name_or_path", "transformers_version"):
            config.pop(key, None)
        write(folder, tensors, config)
        for name in TOKENIZER:
            if (target.place / name).exists():
                shutil.copyfile(target.place / name, folder / name)


def make(target: Target, options: Options) -> Draft:
    return Draft(target, options)
