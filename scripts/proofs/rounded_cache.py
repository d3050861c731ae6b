"""The share of a target's greedy tokens that a cache in fp8 changes, over demo prompts.

    python scripts/proofs/rounded_cache.py [TARGET] [--prompts 80] [--new-tokens 64]
        [--dtype float32] [--device cpu]

The target alone writes texts with a cache in its own dtype. Then it reads the same texts with a
cache in fp8, in one pass each. The first figure is the share of tokens for which another token is
the likeliest in that pass. The second figure is the share of places at which its text written with
a cache in fp8 has another token. It grows with the length, since texts that differ once rarely
agree again.
"""

import argparse
import json

from specdec_cli.core.batch import Span
from specdec_cli.core.types import Request, Sequence
from specdec_cli.demo import demo_path
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.plan import Plan, plan
from specdec_cli.recipe import load_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens that a cache in fp8 changes.")
    parser.add_argument("target", nargs="?", default="demo:target")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    def planned(cache: str) -> Plan:
        return plan(
            load_recipe(
                None,
                {
                    "target.model": options.target,
                    "target.dtype": options.dtype,
                    "run.device": options.device,
                    "speculation.method": "none",
                    "sampling.max_new_tokens": options.new_tokens,
                    "sampling.ignore_eos": True,
                    "cache.dtype": cache,
                },
            )
        )

    plans = [planned(cache) for cache in ("auto", "fp8")]
    lines = demo_path("demo:prompts").read_text(encoding="utf-8").splitlines()
    chosen = lines[:: max(1, len(lines) // options.prompts)][: options.prompts]
    encode = plans[0].tokenizer.encode
    requests = [Request(i, tuple(encode(json.loads(s)["prompt"]))) for i, s in enumerate(chosen)]
    engines = [build(one, max(len(r.token_ids) for r in requests)) for one in plans]
    texts = [
        engine.run(requests, 0, one.params).seqs for engine, one in zip(engines, plans, strict=True)
    ]
    changed = sum(other_tokens(engines[1], seq) for seq in texts[0])
    total = sum(len(seq.output_ids) for seq in texts[0])
    pairs = list(zip(*texts, strict=True))
    differ = sum(
        a != b for one, two in pairs for a, b in zip(one.output_ids, two.output_ids, strict=True)
    )
    alike = sum(one.output_ids == two.output_ids for one, two in pairs)
    print(f"{options.target}, {len(requests)} prompts of {options.new_tokens} tokens each:")
    print(f"given the same text, {changed} of {total} tokens are others ({changed / total:.2%})")
    print(
        f"in texts of their own, {differ} of {total} ({differ / total:.2%}); {alike} are the same"
    )


def other_tokens(engine: Engine, seq: Sequence) -> int:
    """The number of a text's tokens that the engine's target would not write there."""
    fed = Sequence(seq.index, list(seq.tokens), seq.num_prompt_tokens, len(seq.tokens))
    engine.allocator.extend(fed.block_table, len(fed.tokens))
    count = len(seq.output_ids)
    logits = engine.target.forward([Span(fed, 0, len(fed.tokens) - 1)], [count]).logits
    engine.allocator.shrink(fed.block_table, 0)
    return sum(a != b for a, b in zip(logits.argmax(1).tolist(), seq.output_ids, strict=True))


if __name__ == "__main__":
    main()
