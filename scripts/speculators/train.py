"""Train a speculator on texts of the target, for some minutes.

    python -m scripts.speculators.train eagle3 --target MODEL --texts TEXTS --out OUT --minutes 6

The frozen target reads packed rows of texts, and the speculator learns its distributions for each
place of a round. Everything is drawn from the seed. A checkpoint each minute lets a stopped run go
on. From the first minute on, OUT/speculator is a speculator that the engine runs. OUT/log.jsonl has
the held-out accuracy of each place by time.
"""

import argparse
import importlib
import json
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from scripts.speculators import BEGAN, attention, commands
from scripts.speculators.corpus import Rows, by_frequency, joined, packed, read_texts
from scripts.speculators.kinds.base import Kind, Options
from scripts.speculators.loss import Candidates, SoftLoss
from scripts.speculators.target import Reading, Target

KINDS = sorted(p.stem for p in (Path(__file__).parent / "kinds").glob("[a-z]*.py"))
KINDS.remove("base")
# Sizes on a GPU and on a CPU, where a step should take a second.
_SIZES = {
    "length": (1792, 256), "rows": (14, 2), "often": (16384, 2048), "drawn": (4096, 512),
    "held_rows": (24, 4),
}  # fmt: skip
# Options of some kinds, which name them in their `OPTIONS`. Defaults are those of `Options`.
_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "links": (f"chained steps of a head; default: {Options.links}", {"type": int}),
    "layers": ("layers of the target whose inputs a head reads", {"type": int, "nargs": "+"}),
    "inner": ("width of a head's MLP; default: the target's", {"type": int}),
    "depth": (f"layers; default: {Options.depth}", {"type": int}),
    "block": (f"rows of a block's pass; default: {Options.block}", {"type": int}),
    "anchors": ("blocks of a row; default: one for 4 tokens", {"type": int}),
    "rank": (f"of a Markov head; default: {Options.rank}", {"type": int}),
    "vocabulary": ("ids of a head that stores its own rows", {"type": int}),
    "blank": ("begin at random", {"action": "store_true"}),
    "start": (
        "begin with a stored drafter of the same sizes; dflash takes a DSpark drafter too",
        {"metavar": "SPECULATOR"},
    ),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=commands.Help
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--target", required=True, help="folder, hub id or demo:target")
    parser.add_argument("--texts", type=Path, required=True, help="what texts.py wrote")
    parser.add_argument(
        "-o", "--out", type=Path, required=True, help="the result is OUT/speculator"
    )
    told = partial(commands.default, _SIZES)
    parser.add_argument(
        "--minutes",
        type=commands.minutes,
        default=6.0,
        help="counted from the start of the command",
    )
    parser.add_argument("--steps", type=commands.count, help="instead of the minutes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--length", type=int, help=f"tokens of a row; {told('length')}")
    parser.add_argument("--rows", type=int, help=f"rows of a step; {told('rows')}")
    parser.add_argument("--joined", type=float, default=0.125, help="share of conversations")
    parser.add_argument("--often", type=int, help=f"ids of every step's loss; {told('often')}")
    parser.add_argument("--drawn", type=int, help=f"ids drawn for a step's loss; {told('drawn')}")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps; a tenth at most")
    own = parser.add_argument_group("options of some kinds")
    for name, (about, settings) in _OWN.items():
        own.add_argument(f"--{name}", help=about, **settings)
    parser.add_argument("--held-rows", type=int, help=f"of held-out texts; {told('held_rows')}")
    parser.add_argument("--every", type=float, default=1.0, help="minutes between evaluations")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    commands.by_device(args, _SIZES, args.device)
    args.reads = importlib.import_module(f"scripts.speculators.kinds.{args.kind}").OPTIONS
    for name in _OWN:
        if getattr(args, name) and name not in args.reads:
            read = ", ".join(f"--{other}" for other in args.reads)
            raise ValueError(f"--{name}: the kind {args.kind} does not read it, but {read}")
    defaults = Options(anchors=max(1, args.length // 4))
    for name in args.reads:
        setattr(args, name, getattr(args, name) or getattr(defaults, name))
    return args


def schedule(done: float, step: int, warmup: int) -> float:
    """The share of the learning rate: it rises over `warmup` steps, and over a tenth of the run at
    most, then follows a cosine to 0."""
    risen = max((step + 1) / max(1, warmup), 10 * done)
    return min(1.0, risen) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Trainer:
    """One training: the target, a kind, its optimiser, and the texts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        name = args.device if args.device != "auto" else "cpu"
        if args.device == "auto" and torch.cuda.is_available():
            name = "cuda"
        self.device = torch.device(name)
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.set_float32_matmul_precision("high")
            if not attention.flash_is_right(self.device):
                attention.use_dense()
        torch.manual_seed(args.seed)
        self.target = Target(args.target, self.device)
        began = time.perf_counter()
        texts, held, frame = read_texts(args.texts, self.target.vocab_size)
        self.num_texts = len(texts)
        self.text_tokens = sum(len(t.ids) for t in texts)
        self.ranked = by_frequency(texts, self.target.vocab_size)
        self.often = self.ranked[: args.often].sort().values
        self.rows = packed(joined(texts, frame, args.length, args.joined, args.seed), args.length)
        self.held = packed(
            [(t[0], t[1]) for t in joined(held, frame, args.length, 0.0, 0)], args.length
        )
        print(
            f"{self.num_texts} texts of {self.text_tokens} tokens in {len(self.rows)} rows, "
            f"packed in {time.perf_counter() - began:.1f} s",
            flush=True,
        )
        own = {name: getattr(args, name) for name in args.reads}
        options = Options(mask=int(self.ranked[-1]), **own)
        self.made_by = {"kind": args.kind, "target": str(self.target.place.resolve())} | own
        module = importlib.import_module(f"scripts.speculators.kinds.{args.kind}")
        self.kind: Kind = module.make(self.target, options)
        self.kind.module.to(self.device, torch.float32).train()
        matrices = [p for p in self.kind.module.parameters() if p.ndim >= 2]
        others = [p for p in self.kind.module.parameters() if p.ndim < 2]
        self.parameters = matrices + others
        groups = [
            {"params": matrices, "weight_decay": 0.05},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.95), fused=on_cuda)
        self.candidates = Candidates.of(self.often, self.target.vocab_size, args.drawn, self.device)
        self.loss = SoftLoss(on_cuda and not args.no_compile)
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.order = torch.Generator().manual_seed(args.seed)
        self.queue: list[int] = []
        self.step = self.seen = 0
        self.spent = 0.0
        self.log_file = args.out / "log.jsonl"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def batch(self) -> Rows:
        while len(self.queue) < self.args.rows:
            self.queue += torch.randperm(len(self.rows), generator=self.order).tolist()
        places, self.queue = self.queue[: self.args.rows], self.queue[self.args.rows :]
        return self.rows.at(torch.tensor(places), self.device)

    def loss_of(self, reading: Reading) -> Tensor:
        """The weighted mean over tokens and links."""
        ids = self.candidates.draw(self.generator)
        wanted = self.loss.probabilities(reading.logits.flatten(0, 1), ids)
        total, mass = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        with self.autocast():
            links = self.kind.links(reading, self.generator)
        for link in links:
            weight = link.weight * self.kind.fade**link.place
            goals = wanted if link.goal is None else wanted[link.goal]
            head = link.head(self.target.head, ids)
            loss, common = self.loss(link.hidden, head, goals, weight)
            total = total + loss
            if link.confidence is not None:
                doubts = binary_cross_entropy_with_logits(link.confidence.float(), common, weight)
                total = total + doubts * weight.numel()
            mass = mass + weight.sum()
        return total / mass

    @torch.no_grad()
    def accuracies(self) -> list[float]:
        """For each link, the share of held-out answers' tokens that are its first choice."""
        right, count = torch.zeros(2, self.kind.num_links, dtype=torch.int64, device=self.device)
        places = torch.arange(min(self.args.held_rows, len(self.held)))
        generator = torch.Generator(self.device).manual_seed(0)
        for some in places.split(max(1, self.args.rows // 2)):
            rows = self.held.at(some, self.device)
            reading = self.target.read(rows, self.kind.feature_layers)
            choice = reading.logits.flatten(0, 1).argmax(-1)
            with self.autocast():
                links = self.kind.links(reading, generator)
            for link in links:
                known = link.weight == 1
                wanted = (choice if link.goal is None else choice[link.goal])[known]
                head = link.head(self.target.head)
                is_right = (link.hidden[known].to(head.dtype) @ head.T).argmax(-1) == wanted
                place = torch.as_tensor(link.place, device=self.device).expand(known.shape)[known]
                right += torch.bincount(place[is_right], minlength=len(right))
                count += torch.bincount(place, minlength=len(count))
        right, count = right.tolist(), count.tolist()
        return [r / max(1, n) for r, n in zip(right, count, strict=True)]

    def record(self, losses: list[Tensor], seconds: float, done: float) -> dict[str, Any]:
        found = {
            "step": self.step,
            "done": round(done, 4),
            "seconds": round(seconds, 1),
            "tokens": self.seen,
            "tokens_per_s": round(self.seen / max(seconds, 1e-9)),
            "loss": round(float(torch.stack(losses).mean()), 4) if losses else None,
            "accuracy": [round(a, 4) for a in self.accuracies()],
        }
        loss = f", loss {found['loss']:.3f}" if losses else ""
        right = " ".join(f"{a:.2f}".lstrip("0") for a in found["accuracy"])
        print(
            f"{min(done, 1):4.0%} after {seconds / 60:.1f} min: step {self.step}, "
            f"{found['tokens_per_s']:,} tokens/s{loss}, held-out accuracy by place {right}",
            flush=True,
        )
        with self.log_file.open("a") as log:
            log.write(json.dumps(found) + "\n")
        return found

    def save(self, found: dict[str, Any]) -> None:
        """Save the speculator, the record of its training, and the state from which to go on."""
        args = self.args
        self.kind.save(self.target, self.ranked, args.out / "speculator")
        size = sum(p.numel() for p in self.parameters)
        told = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
        told |= found | {
            "texts": self.num_texts,
            "text_tokens": self.text_tokens,
            "epochs": round(self.seen / max(1, self.text_tokens), 3),
            "parameters": size,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device_name": "CPU",
        }
        if self.device.type == "cuda":
            told["device_name"] = torch.cuda.get_device_name()
            told["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        (args.out / "training.json").write_text(json.dumps(told, indent=1) + "\n")
        state = {
            "module": self.kind.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "kind": self.kind.state(),
            "made_by": self.made_by,
            "step": self.step,
            "seen": self.seen,
            "spent": found["seconds"],
        }
        torch.save(state, args.out / "state.part")
        os.replace(args.out / "state.part", args.out / "state.pt")

    def resume(self) -> None:
        """Go on from a checkpoint, if there is one, with new rows. Raises `ValueError` for a
        checkpoint of another kind, over another target or with other options."""
        path = self.args.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        made_by = state.get("made_by", self.made_by)
        for name, value in made_by.items():
            if self.made_by.get(name) != value:
                raise ValueError(
                    f"{self.args.out} was trained with {name} {value}, and not with "
                    f"{self.made_by.get(name)}: go on with the same, or name another --out"
                )
        self.kind.module.load_state_dict(state["module"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.kind.restore(state["kind"])
        self.step, self.seen, self.spent = state["step"], state["seen"], state["spent"]
        self.generator.manual_seed(self.args.seed + self.step)
        self.order.manual_seed(self.args.seed + self.step)
        self.queue = []  # rows in the order that the run began with

    def run(self) -> None:
        args = self.args
        first = self.target.read(self.batch(), self.kind.feature_layers)
        if self.device.type == "cuda":
            self.target.capture(first.rows, self.kind.feature_layers)
        self.kind.prepare(first)
        self.resume()
        # With a number of steps, the time before the first one does not count as training.
        started = time.perf_counter() if args.steps else BEGAN
        began, due, losses = started - self.spent, self.spent, []
        while True:
            elapsed = time.perf_counter() - began
            done = self.step / args.steps if args.steps else elapsed / (60 * args.minutes)
            if elapsed >= due or done >= 1:
                self.save(self.record(losses, elapsed, done))
                losses = []
                due = elapsed + 60 * args.every
                if done >= 1:
                    break
            warmup = args.warmup
            if args.steps:
                warmup = max(1, min(warmup, args.steps // 10))
            for group in self.optimiser.param_groups:
                group["lr"] = args.lr * schedule(done, self.step, warmup)
            reading = self.target.read(self.batch(), self.kind.feature_layers)
            loss = self.loss_of(reading)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            self.step += 1
            self.seen += reading.rows.ids.numel()


def main() -> None:
    args = parse()
    transformers.utils.logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    trainer.run()
    if not trainer.step:
        raise ValueError(f"no step was taken in {args.minutes:g} minutes: raise --minutes")
    print(
        f"trained: {args.out / 'speculator'}; to measure it: specdec sweep-k --target "
        f"{args.target} --draft {args.out / 'speculator'} --prompt-file PROMPTS"
    )


if __name__ == "__main__":
    commands.run(main)
