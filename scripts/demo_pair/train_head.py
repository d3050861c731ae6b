"""Train an EAGLE-3 head for the demo target.

Half of the steps read the corpus. The other half read texts that the target writes after prompts of
the training files, since acceptance is measured on its own text. Each step chains the head's
outputs (training-time test, Li et al., arXiv 2503.01840) and compares every link's distribution
with the target's. Knows nothing of `specdec_cli`. Resumes from OUT/state.pt.
"""

import argparse
import copy
import json
import lzma
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from evaluate import load_heldout, load_model
from evaluate_head import chain_figures, own_texts, rounds
from head import Head, head_shape, read_target, save
from torch import Tensor
from torch.nn import functional as F
from train import Corpus
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # temperatures of the target's texts, in turn
DECAY = 0.5  # the last share of the steps, over which the learning rate falls to 0
WARMUP = 0.02  # the first share of the steps, over which it rises
FADE = 0.9  # the weight of a link relative to the link before
POOL = 64  # batches of the target's text that are kept for further reading


class Writer:
    """Batches of the target's text. They are read several times, since writing is slow."""

    def __init__(self, target: LlamaForCausalLM, data: Path, args: argparse.Namespace) -> None:
        raw = np.frombuffer(lzma.decompress((data / "prompts.bin.xz").read_bytes()), "<u2")
        ends = np.flatnonzero(raw == 0)
        prompts = np.split(raw.astype(np.int64), ends + 1)[:-1]
        self.prompts = sorted((p[:-1] for p in prompts), key=len)
        self.target, self.args = target, args
        self.random = random.Random(args.seed)
        self.pool: list[Tensor] = []
        self.written = 0

    def write(self) -> list[Tensor]:
        """[rows, T] ids: prompts of about one length, cut at the front to the shortest, and their
        continuations."""
        rows = self.args.own_rows * self.args.splits
        start = self.random.randrange(len(self.prompts) - rows)
        picked = self.prompts[start : start + rows]
        size = len(picked[0])
        ids = torch.from_numpy(np.stack([p[-size:] for p in picked])).to(self.target.device)
        temperature = TEMPERATURES[self.written % len(TEMPERATURES)]
        self.written += 1
        text = written(self.target, ids, self.args.own_tokens, temperature)
        return list(text[torch.randperm(rows)].split(self.args.own_rows))

    def batch(self) -> Tensor:
        due = self.random.random() < 1 / (self.args.reuse * self.args.splits)
        if len(self.pool) < 2 * self.args.splits or due:
            self.pool = (self.pool + self.write())[-POOL:]
        return self.random.choice(self.pool)


@torch.no_grad()
def written(target: LlamaForCausalLM, ids: Tensor, count: int, temperature: float) -> Tensor:
    """`ids` [B, T] with `count` further tokens. An end of text does not stop it."""
    sampling = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    settings = GenerationConfig(max_new_tokens=count, pad_token_id=0, **sampling)
    return target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)


def loss_of(head: Head, target: LlamaForCausalLM, ids: Tensor, steps: int) -> Tensor:
    """The cross-entropy with the target's distribution, as the weighted mean over links."""
    features, wanted = read_target(target, ids, head.shape.layers)
    wanted = wanted[:, 1:].float().softmax(-1)
    total = torch.zeros((), device=ids.device)
    mass = 0.0
    for step, out in enumerate(head.chain(features[:, :-1], ids[:, 1:], steps)):
        logits = head.logits(out[:, step:]).float()
        weight = FADE**step
        loss = F.cross_entropy(logits.flatten(0, 1), wanted[:, step:].flatten(0, 1))
        total, mass = total + weight * loss, mass + weight
    return total / mass


def rate(done: float, lr: float) -> float:
    """Warm-up, constant, then linear to zero; done: share of the training that is over."""
    return lr * min(1.0, done / WARMUP + 0.01) * min(1.0, max(0.0, 1 - done) / DECAY)


def optimiser(head: Head, lr: float, device: str) -> torch.optim.AdamW:
    matrices = [p for p in head.parameters() if p.ndim == 2]
    norms = [p for p in head.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device == "cuda")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(".corpus/pack"))
    parser.add_argument("--demo", type=Path, default=Path("specdec_cli/demo"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int, help="instead of the minutes")
    parser.add_argument("--links", type=int, default=5, help="chained steps of the head")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rows", type=int, default=32, help="windows of the corpus in a batch")
    parser.add_argument("--own-rows", type=int, default=128, help="texts of the target in a batch")
    parser.add_argument("--own-tokens", type=int, default=64, help="tokens that it writes")
    parser.add_argument("--splits", type=int, default=8, help="batches that it writes at once")
    parser.add_argument("--reuse", type=int, default=4, help="how often the target's text is read")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 5, 7])
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--blank", action="store_true", help="begin at random")
    parser.add_argument("--every", type=float, default=0.05, help="share between evaluations")
    parser.add_argument("--texts", type=int, default=100, help="held-out prompts that judge it")
    parser.add_argument("--seed", type=int, default=20252)
    parser.add_argument("--smoke", action="store_true", help="a tiny run that tests the script")
    args = parser.parse_args()
    if args.smoke:
        args.context, args.rows, args.own_rows, args.own_tokens, args.texts = 64, 2, 2, 8, 4
    return args


def main() -> None:
    args = parse()
    torch.set_float32_matmul_precision("high")
    transformers.utils.logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    target = load_model(args.demo / "target", args.device).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.demo / "target")
    shape = head_shape(tuple(args.layers), args.inner)
    head = Head(shape, target.model.embed_tokens.weight).cpu()
    if not args.blank:
        source = copy.deepcopy(target.model).cpu()
        head.start_from(source.layers[-1], source.norm)
    head.to(args.device)
    optim = optimiser(head, args.lr, args.device)
    meta = json.loads((args.data / "meta.json").read_text())
    corpus = Corpus.load(args.data, args.context, args.device, meta)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    writer = Writer(target, args.data, args)
    # Odd prompts choose the checkpoint. The published figures are those of the even prompts.
    lines = (args.demo / "prompts.jsonl").read_text().splitlines()[1::2][: args.texts]
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    own = own_texts(target, prompts, 8 if args.smoke else 48)
    windows = load_heldout(args.data / "heldout.bin", 256).to(args.device)[::16][:16]

    step, spent, best, seen = 0, 0.0, 0.0, 0
    log = (args.out / "log.jsonl").open("a")
    saved = args.out / "state.pt"
    if saved.exists():
        state = torch.load(saved, map_location=args.device)
        head.load_state_dict(state["head"])
        optim.load_state_dict(state["optim"])
        step, spent, best, seen = (state[k] for k in ("step", "spent", "best", "seen"))
        generator.manual_seed(args.seed + step)
        writer.random.seed(args.seed + step)
    began, shown, due = time.perf_counter() - spent, [], 0.0
    on_cuda = args.device == "cuda"
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=on_cuda)
    done = 0.0
    while done < 1:
        elapsed = time.perf_counter() - began
        done = min(1.0, step / args.steps if args.steps else elapsed / (60 * args.minutes))
        if done >= due or done == 1:
            due = done + args.every
            judged = rounds(head, target, own, 4)
            held = chain_figures(head, target, windows, 6)
            record: dict[str, Any] = {
                "step": step,
                "done": round(done, 3),
                "seconds": round(elapsed, 1),
                "tokens": seen,
                "loss": round(float(np.mean([float(x) for x in shown] or [0.0])), 4),
                "tokens_a_round": round(judged["tokens_a_round"], 3),
                "accepted": [round(x, 3) for x in judged["accepted"]],
                "greedy": [round(row["greedy"], 3) for row in held],
                "alpha": [round(row["alpha"], 3) for row in held],
            }
            print(json.dumps(record), flush=True)
            log.write(json.dumps(record) + "\n")
            log.flush()
            shown = []
            if judged["tokens_a_round"] > best or not best:
                best = judged["tokens_a_round"]
                save(head, args.out / "head")
                plan = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
                plan |= {"shape": asdict(shape), "torch": torch.__version__, **record}
                plan["device_name"] = torch.cuda.get_device_name() if on_cuda else "CPU thread"
                (args.out / "training.json").write_text(json.dumps(plan, indent=1) + "\n")
            state = {"head": head.state_dict(), "optim": optim.state_dict()}
            state |= {"step": step, "spent": elapsed, "best": best, "seen": seen}
            torch.save(state, saved)
            if done == 1:
                break
        for group in optim.param_groups:
            group["lr"] = rate(done, args.lr)
        ids = writer.batch() if step % 2 else corpus.batch(args.rows, generator)[:, :-1]
        with autocast:
            loss = loss_of(head, target, ids, args.links)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        shown.append(loss.detach())
        step, seen = step + 1, seen + ids.numel()


if __name__ == "__main__":
    main()
