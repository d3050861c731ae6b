"""Train the demo pair: a target, a draft on the same text, and a draft distilled from the target.

One command, one device, a wall-clock budget per model. Every model is saved as soon as it is
trained, so a later failure does not lose it. Knows nothing of `specdec_cli`.
"""

import argparse
import copy
import json
import lzma
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import transformers
from evaluate import CONTEXT, figures, heldout_loss, load_heldout, load_model, logits_of, table
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

TARGET = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
}
DRAFT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 344,
}
SHARED = {
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "attention_bias": False,
    "mlp_bias": False,
}
WARMUP = 200  # number of steps with a rising learning rate
TIMED = (40, 140)  # first steps, whose speed determines the number of steps
DECAY = 0.5  # the last share of the steps, over which the learning rate falls to 0
RESERVE = 0.94  # fraction of the budget for steps; evaluation takes the rest
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Plan:
    """The training plan of one model."""

    name: str
    shape: dict[str, int]
    minutes: float
    lr: float
    batch: int
    seed: int
    steps: int | None = None  # instead of the minutes
    distil: float = 0.0  # the weight of KL(target || draft); the rest is cross-entropy


@dataclass
class Corpus:
    """The whole training text on the device, sampled in random windows."""

    tokens: Tensor  # [N] int32
    starts: Tensor  # [S] segment starts
    spans: Tensor  # [S] number of window starts of a segment
    weights: Tensor  # [S] sampling probability of a segment
    context: int

    @classmethod
    def load(cls, data: Path, context: int, device: str, meta: dict[str, Any]) -> "Corpus":
        raw = lzma.decompress((data / "train.bin.xz").read_bytes())
        tokens = torch.from_numpy(np.frombuffer(raw, "<u2").astype(np.int32)).to(device)
        segments = [s for s in meta["segments"] if s["tokens"] > context + 1]
        spans = [s["tokens"] - context for s in segments]
        mass = [s["weight"] * n for s, n in zip(segments, spans, strict=True)]
        return cls(
            tokens,
            torch.tensor([s["start"] for s in segments], device=device),
            torch.tensor(spans, device=device),
            torch.tensor(mass, device=device) / sum(mass),
            context,
        )

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        """[size, context + 1] token ids."""
        device = self.tokens.device
        segment = torch.multinomial(self.weights, size, True, generator=generator)
        u = torch.rand(size, generator=generator, device=device, dtype=torch.float64)
        start = self.starts[segment] + (u * self.spans[segment]).long()
        steps = torch.arange(self.context + 1, device=device)
        return self.tokens[start[:, None] + steps].long()


def build(shape: dict[str, int], seed: int, device: str) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHARED, **shape)).to(device)


def schedule(step: int, steps: int, lr: float) -> float:
    """Warm-up, constant, then linear to zero."""
    rising = min(1.0, (step + 1) / min(WARMUP, max(1, steps // 4)))
    falling = min(1.0, (steps - step) / max(1.0, DECAY * steps))
    return lr * rising * falling


def optimiser(model: LlamaForCausalLM, lr: float, device: str) -> torch.optim.AdamW:
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device == "cuda")


def loss_of(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, distil: float, w: Tensor
) -> Tensor:
    """Cross-entropy, mixed with KL(teacher || model) if there is a teacher."""
    logits = logits_of(model, w[:, :-1]).float().flatten(0, 1)
    loss = F.cross_entropy(logits, w[:, 1:].flatten())
    if teacher is None:
        return loss
    with torch.no_grad():
        wanted = logits_of(teacher, w[:, :-1]).float().flatten(0, 1).log_softmax(-1)
    kl = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
    return distil * kl + (1 - distil) * loss


class Trainer:
    def __init__(self, args: argparse.Namespace, corpus: Corpus, windows: Tensor, log: TextIO):
        self.args = args
        self.corpus = corpus
        self.windows = windows
        self.log_file = log
        self.began = time.perf_counter()
        self.compile = args.device == "cuda" and not args.no_compile

    def log(self, **record: Any) -> None:
        record["at"] = round(time.perf_counter() - self.began, 1)
        print(json.dumps(record), flush=True)
        self.log_file.write(json.dumps(record) + "\n")
        self.log_file.flush()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.args.device, dtype=torch.bfloat16)

    def sync(self) -> None:
        if self.args.device == "cuda":
            torch.cuda.synchronize()

    def loss_function(self) -> Callable[..., Tensor]:
        return torch.compile(loss_of, dynamic=False) if self.compile else loss_of

    def train(self, plan: Plan, teacher: LlamaForCausalLM | None) -> tuple[LlamaForCausalLM, dict]:
        """Train a model. Returns it at its best held-out loss, with a record of the training."""
        device = self.args.device
        model = build(plan.shape, plan.seed, device)
        optim = optimiser(model, plan.lr, device)
        generator = torch.Generator(device).manual_seed(plan.seed)
        loss_function = self.loss_function()
        rows = max(1, plan.batch // self.corpus.context)
        steps: float = plan.steps or math.inf
        first, last = (2, 4) if self.args.smoke else TIMED
        began = clock = time.perf_counter()
        best_loss, best, best_step = math.inf, {}, 0
        step = 0

        def fit(share: float) -> int:
            """The number of steps that fill `share` of the budget at the pace since `clock`."""
            self.sync()
            now = time.perf_counter()
            pace = (now - clock) / (step - first)
            return step + max(4, int((plan.minutes * 60 * share - (now - began)) / pace))

        while step < steps:
            if step == first:
                self.sync()
                clock = time.perf_counter()
            if step == last and not plan.steps:
                steps = fit(RESERVE)
                speed = rows * self.corpus.context * (last - first) / (time.perf_counter() - clock)
                self.log(model=plan.name, steps=steps, tokens_per_s=round(speed))
            lr = plan.lr * min(1.0, (step + 1) / WARMUP)
            if steps != math.inf:
                lr = schedule(step, int(steps), plan.lr)
            for group in optim.param_groups:
                group["lr"] = lr
            w = self.corpus.batch(rows, generator)
            try:
                with self.autocast():
                    loss = loss_function(model, teacher, plan.distil, w)
                loss.backward()
            except Exception as error:
                if step or not self.compile:
                    raise
                self.log(model=plan.name, compile_failed=repr(error)[:300])
                self.compile = False
                loss_function = loss_of
                optim.zero_grad(set_to_none=True)
                continue
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            optim.zero_grad(set_to_none=True)
            step += 1
            every = 500 if steps == math.inf else max(2, int(steps) // 24)
            if step % every == 0 or step == steps:
                with self.autocast():
                    held = heldout_loss(model, self.windows, self.args.eval_batch)
                if held < best_loss:
                    best_loss, best, best_step = held, copy.deepcopy(model.state_dict()), step
                self.log(
                    model=plan.name,
                    step=step,
                    lr=round(lr, 6),
                    loss=round(float(loss.detach()), 4),
                    heldout=round(held, 4),
                    norm=round(float(norm), 3),
                )
                # Before the decay the total number does not matter, so it follows the measured
                # pace.
                if not plan.steps and last < step < (1 - DECAY) * steps - every:
                    steps = max(fit(0.98), math.ceil(step / (1 - DECAY)))
                if not plan.steps and time.perf_counter() - began > plan.minutes * 60 * 1.2:
                    self.log(model=plan.name, stopped="over its time")
                    break
        model.load_state_dict(best)
        seconds = time.perf_counter() - began
        tokens = best_step * rows * self.corpus.context
        record = {
            **asdict(plan),
            "steps": step,
            "best_step": best_step,
            "tokens_seen": tokens,
            "seconds": round(seconds, 1),
            "best_heldout_bf16": best_loss,
            "compiled": self.compile,
        }
        self.log(model=plan.name, trained=tokens, seconds=round(seconds, 1), heldout=best_loss)
        return model.eval(), record


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Save bf16 weights and the config; export.py writes the files that all models share."""
    half = copy.deepcopy(model).cpu().to(torch.bfloat16)
    half.config.architectures = ["LlamaForCausalLM"]
    half.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def pick_prompts(path: Path, count: int) -> list[str]:
    if not path.exists():
        return ["def mean(values):\n    "]
    prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    return prompts[:: max(1, len(prompts) // count)][:count]


@torch.no_grad()
def complete(
    model: LlamaForCausalLM, tokenizer: Any, prompt: str, length: int, temperature: float
) -> str:
    device = model.device
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=temperature > 0,
        pad_token_id=0,
        **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}),
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=False))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(".corpus/pack"))
    parser.add_argument("--prompts", type=Path, default=Path("specdec_cli/demo/prompts.jsonl"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=5.0, help="wall clock for the target")
    parser.add_argument("--draft-minutes", type=float, default=1.4, help="the same for a draft")
    parser.add_argument("--steps", type=int, nargs=3, help="steps by model, not minutes")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--batch", type=int, default=131_072, help="tokens")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--draft-lr", type=float, default=5e-3)
    parser.add_argument("--distil", type=float, default=0.9)
    parser.add_argument("--eval-batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=20250)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a tiny run that tests the script")
    args = parser.parse_args()
    if args.smoke:
        args.context, args.batch, args.eval_batch = 64, 512, 8
    return args


def main() -> None:
    args = parse()
    torch.set_float32_matmul_precision("high")
    transformers.utils.logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    meta = json.loads((args.data / "meta.json").read_text())
    windows = load_heldout(args.data / "heldout.bin", args.context).to(args.device)
    if args.smoke:
        windows = windows[:16]
    with (args.out / "log.jsonl").open("w") as log:
        trainer = Trainer(
            args, Corpus.load(args.data, args.context, args.device, meta), windows, log
        )
        record: dict[str, Any] = {
            "seed": args.seed,
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "context": args.context,
            "train_tokens": meta["train_tokens"],
            "heldout_tokens": meta["heldout_tokens"],
            "heldout_bytes_per_token": meta["heldout_bytes_per_token"],
            "weights": {s["name"]: s["weight"] for s in meta["segments"]},
            "models": {},
        }
        trainer.log(loaded=meta["train_tokens"], device=record["device"])

        def keep(plan: Plan, teacher: LlamaForCausalLM | None) -> LlamaForCausalLM:
            model, record["models"][plan.name] = trainer.train(plan, teacher)
            save(model, args.out / plan.name)
            (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
            return model

        target_steps, draft_steps, distil_steps = args.steps or (None, None, None)
        draft = Plan(
            *("draft", DRAFT, args.draft_minutes, args.draft_lr, args.batch, args.seed + 1),
            steps=draft_steps,
        )
        target = keep(
            Plan(
                *("target", TARGET, args.minutes, args.lr, args.batch, args.seed),
                steps=target_steps,
            ),
            None,
        ).requires_grad_(False)
        keep(draft, None)
        distilled = replace(draft, name="draft-distilled", steps=distil_steps, distil=args.distil)
        keep(distilled, target)
        del target

        # The figures are those of the saved bf16 weights, computed in fp32.
        torch.set_float32_matmul_precision("highest")
        rows = figures(
            *(args.out, windows, meta["heldout_bytes_per_token"], args.device),
            min(16, args.eval_batch),
        )
        record["figures"] = rows
        (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
        print(table(rows), flush=True)

        tokenizer = AutoTokenizer.from_pretrained(args.data / "tokenizer")
        model = load_model(args.out / "target", args.device)
        torch.manual_seed(args.seed)
        record["samples"] = []
        length = 16 if args.smoke else 120
        for prompt in pick_prompts(args.prompts, 6):
            for temperature in (0.0, TEMPERATURE):
                text = complete(model, tokenizer, prompt, length, temperature)
                record["samples"].append(
                    {"prompt": prompt, "temperature": temperature, "completion": text}
                )
                print(f"\n===== T={temperature}\n{prompt}«»{text}", flush=True)
        (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
        trainer.log(done=True)


if __name__ == "__main__":
    main()
