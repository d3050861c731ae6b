"""Write training texts: prompts, and the answers that the target gives to them.

    python -m scripts.speculators.texts --target MODEL --out TEXTS --minutes 5

There are three kinds of prompts: texts with which the target continues an empty user turn of its
chat template; requests and tasks of `frames.py` about passages that it wrote; and lines of
`--prompts`. The engine writes the answers in waves, with a file for each. A wave depends on the
seed, its number and the waves before it, so that a stopped run goes on where it ended. `--shard
I/N` writes every Nth wave: processes side by side keep one GPU busier than one does, since the host
is the limit.
"""

import argparse
import contextlib
import itertools
import json
import random
import re
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from scripts.speculators import BEGAN, commands
from scripts.speculators.cleaning import OVERLAP, Avoided, end_of_sense
from scripts.speculators.corpus import Frame, Text, read_wave, write_wave
from scripts.speculators.frames import Passage, seed, task
from scripts.speculators.target import named
from specdec_cli.commands.options import parse_sets
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.plan import Plan, plan
from specdec_cli.experiment.rendering import texts_of
from specdec_cli.prompts import Prompt, load_prompts
from specdec_cli.prompts.records import CONVERSATION_KEY, MESSAGES_KEY, prompt_of
from specdec_cli.prompts.turns import NoSuchTurn
from specdec_cli.prompts.types import BadRow
from specdec_cli.recipe import load_recipe
from specdec_cli.recipe.sections import DataSection
from specdec_cli.text import counted

# Kinds of waves in turn. Passages come before the first tasks about them.
KINDS = ("seeds", "turns", "tasks", "tasks", "turns", "tasks", "tasks", "seeds", "tasks", "turns")
TEMPERATURES = (0.0, 0.4, 0.8)  # temperatures of answers, in turn
SEED_TEMPERATURE = 0.8  # temperatures of passages, which should be varied
TURN = {"temperature": 1.0, "top_p": 0.9}  # temperatures of self-drawn user turns
TURN_TOKENS = 96
# Sizes on a GPU and on a CPU, where a wave should take less than a minute.
_SIZES = {"batch": (1024, 16), "new_tokens": (512, 96), "prompt_tokens": (1024, 192)}
RECENT = 6  # number of waves whose passages are used for tasks
WHOLE = ("turns", MESSAGES_KEY, CONVERSATION_KEY)  # keys of whole conversations
MARK = "\u241e"  # placeholder of a message's text in a rendered conversation


@dataclass(frozen=True)
class Asked:
    """A prompt: its token ids, including the chat template's, and its kind."""

    ids: tuple[int, ...]
    kind: str


class Chat:
    """The target's tokenizer and chat template, many texts at a time."""

    def __init__(self, place: Path, eos_ids: frozenset[int]) -> None:
        folder, file = named(place)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **file)
        self.has_template = bool(self.tokenizer.chat_template)
        self.eos_ids = eos_ids
        if not self.has_template:
            self.frame = Frame()
            return
        alone = self._rendered([{"role": "user", "content": MARK}])
        more = [
            {"role": "user", "content": MARK},
            {"role": "assistant", "content": MARK},
            {"role": "user", "content": MARK},
        ]
        self.opening, self.closing = alone.split(MARK)
        between = self._rendered(more).split(MARK)[2]
        ids = self.encode([self.opening, between])
        self.frame = Frame(ids[0], ids[1], tuple(sorted(eos_ids)))

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return text

    def encode(self, texts: list[str], special: bool = False) -> list[tuple[int, ...]]:
        found = self.tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        return [tuple(ids) for ids in found]

    def prompts(self, texts: list[str]) -> list[tuple[int, ...]]:
        """The ids of user turns, up to the beginning of the answer."""
        if not self.has_template:
            return self.encode(texts, special=True)
        return self.encode([f"{self.opening}{text}{self.closing}" for text in texts])

    def decode(self, rows: list[list[int]]) -> list[str]:
        return [str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows]


class Writer:
    """Writes the waves of one shard."""

    def __init__(self, args: argparse.Namespace, planned: Plan, engine: Engine) -> None:
        self.args, self.planned, self.engine = args, planned, engine
        eos = frozenset(planned.target.eos_ids)
        self.chat = Chat(planned.target.place, eos)
        self.passages: list[list[Passage]] = []  # number of the shard's waves
        self.given: list[str] = []
        self.greedy: set[tuple[int, ...]] = set()  # the given prompts that have a greedy answer
        self.overlapping = 0  # prompts and texts that share a run with an avoided prompt
        if args.prompts:
            found = load_prompts(DataSection(path=args.prompts)).prompts
            # The answer to a later turn would need the conversation before it.
            self.given = [turn for prompt in found for turn in users_turns(prompt)[:1]]
            if not self.given:
                raise ValueError(f"{args.prompts} has no texts of users, only token ids or systems")
        elif not self.chat.has_template:
            raise ValueError("the target has no chat template: name a file with --prompts")
        avoided = [turn for path in args.avoid for turn in turns_in(Path(path))]
        # A text in the middle of another often begins with a space.
        self.avoided = Avoided(
            [
                ids
                for texts in (avoided, [f" {t}" for t in avoided])
                for ids in self.chat.encode(texts)
            ]
            if avoided
            else []
        )

    def params(self, **changed: Any) -> SamplingParams:
        return replace(self.planned.params, seed=self.args.seed, **changed)

    def write(
        self, wave: int, rows: list[tuple[int, ...]], params: SamplingParams
    ) -> list[list[int]]:
        """The target's tokens after each of `rows`. Rows are numbered so that no two draw the
        same."""
        first = 4 * wave * self.args.batch + (2 * self.args.batch if params.top_p < 1 else 0)
        asked = [Request(first + i, ids) for i, ids in enumerate(rows)]
        return [seq.output_ids for seq in self.engine.run(asked, 0, params).seqs]

    def asked(self, wave: int, kind: str) -> list[Asked]:
        """The prompts of a wave."""
        rng = random.Random(f"{self.args.seed} {wave}")
        count = self.args.batch
        if kind == "given":
            texts = [self.given[(wave * count + i) % len(self.given)] for i in range(count)]
            return self.fitting([Asked(ids, kind) for ids in self.chat.prompts(texts)])
        if kind == "turns":
            params = self.params(**TURN, max_new_tokens=self.args.turn_tokens)
            drawn = self.write(wave, [self.chat.frame.opening] * count, params)
            ended = [ids[:-1] for ids in drawn if ids and ids[-1] in self.chat.eos_ids]
            texts = [t.strip() for t in self.chat.decode(ended)]
            texts = list(dict.fromkeys(t for t in texts if len(t) > 8))
            return self.fitting([Asked(ids, kind) for ids in self.chat.prompts(texts)])
        if kind == "seeds":
            pairs = [seed(rng) for _ in range(count)]
            ids = self.chat.prompts([text for _, text in pairs])
            return self.fitting([Asked(i, k) for i, (k, _) in zip(ids, pairs, strict=True)])
        recent = [p for passages in self.passages[-RECENT:] for p in passages]
        texts = [task(rng, recent) for _ in range(count)]
        return self.fitting([Asked(ids, kind) for ids in self.chat.prompts(texts)])

    def fitting(self, asked: list[Asked]) -> list[Asked]:
        """The prompts that are short enough and share no run with an avoided one."""
        short = [a for a in asked if 0 < len(a.ids) <= self.args.prompt_tokens]
        apart = [a for a in short if not self.avoided.is_in(np.array(a.ids))]
        self.overlapping += len(short) - len(apart)
        return apart

    def wave(self, wave: int) -> dict[str, Any]:
        """Write a wave, or read it if it is there. Returns its record."""
        path = self.args.out / f"wave-{wave:05}.npz"
        mine = wave // self.args.shards
        kind = "given" if self.given else KINDS[mine % len(KINDS)]
        if kind == "tasks" and not self.passages:  # no passage was kept so far
            kind = "seeds"
        if path.exists():
            texts, record = read_wave(path)
            self.keep(texts)
            if kind == "given" and record["temperature"] == 0:
                self.greedy |= {tuple(t.ids[: t.start].tolist()) for t in texts}
            return record | {"is_new": False}
        began, overlapping = time.perf_counter(), self.overlapping
        asked = self.asked(wave, kind)
        temperature = SEED_TEMPERATURE if kind == "seeds" else temperature_of(mine)
        if kind == "given" and temperature == 0:
            ids = {a.ids for a in asked}
            if ids & self.greedy:  # its answers would be the same texts again
                temperature = TEMPERATURES[1]
            self.greedy |= ids
        params = self.params(temperature=temperature, max_new_tokens=self.args.new_tokens)
        answers = self.write(wave, [a.ids for a in asked], params)
        texts, cut = [], 0
        for one, answer in zip(asked, answers, strict=True):
            kept = answer[: end_of_sense(np.array(answer, np.int64))]
            cut += len(answer) - len(kept)
            ids = np.array([*one.ids, *kept], np.int64)
            if self.avoided.is_in(ids):
                self.overlapping += 1
            elif len(kept) >= 4:
                texts.append(Text(ids, len(one.ids), one.kind))
        seconds = time.perf_counter() - began
        record = {
            "wave": wave,
            "kind": kind,
            "temperature": temperature,
            "texts": len(texts),
            "tokens": sum(len(t.ids) for t in texts),
            "answers": sum(len(t.ids) - t.start for t in texts),
            "written": sum(map(len, answers)),
            "ended": sum(a[-1] in self.chat.eos_ids for a in answers if a),
            "looped": cut,
            "overlapping": self.overlapping - overlapping,
            "seconds": round(seconds, 2),
            "seed": self.args.seed,
        }
        write_wave(path, texts, record)
        self.keep(texts)
        return record | {"is_new": True}

    def keep(self, texts: list[Text]) -> None:
        """Remember the passages among `texts` for tasks."""
        of_use = [
            t for t in texts if t.kind in ("english", "foreign", "problem", "code", "question")
        ]
        answers = self.chat.decode([t.ids[t.start :].tolist() for t in of_use])
        found = [Passage(t.kind, a) for t, a in zip(of_use, answers, strict=True) if len(a) > 20]
        self.passages += [found] if found else []


def temperature_of(mine: int) -> float:
    """The temperature of a shard's wave. Waves of seeds do not count."""
    cycle, place = divmod(mine, len(KINDS))
    others = [kind != "seeds" for kind in KINDS]
    return TEMPERATURES[(cycle * sum(others) + sum(others[:place])) % len(TEMPERATURES)]


def users_turns(prompt: Prompt) -> list[str]:
    """The user's texts in a prompt, without messages of systems and assistants; none for token
    ids."""
    own = [] if prompt.text is None else [prompt.text]
    own += ["\n".join(texts_of(m)) for m in prompt.messages or () if m["role"] == "user"]
    return [*own, *prompt.later]


def turns_of(line: Any) -> list[str]:
    """The user's texts in a line of a prompt file: all turns of a conversation, beside the text of
    the line's first known key. Raises `BadRow` for a line without any."""
    whole = [key for key in WHOLE if isinstance(line, dict) and line.get(key)]
    found: list[str] = []
    for column in (None, *whole):
        read = prompt_of(line, column)
        # ShareGPT's conversations are read up to a turn; other forms have no turns to choose.
        with contextlib.suppress(NoSuchTurn, BadRow):
            for turn in itertools.count(2):
                if (longer := prompt_of(line, column, turn)) == read:
                    break
                read = longer
        found += users_turns(read)
    if not found:
        raise BadRow("has no text of a user")
    return list(dict.fromkeys(found))


def turns_in(path: Path) -> list[str]:
    """The user's texts in a .jsonl file of prompts. Raises `ValueError` that names a line without
    any."""
    found: list[str] = []
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if not line.strip():
            continue
        try:
            found += turns_of(json.loads(line))
        except (BadRow, NoSuchTurn, ValueError) as problem:
            told = str(problem) or "its conversation has no turn of a user"
            raise ValueError(f"{path}:{number}: {told}") from None
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=commands.Help
    )
    parser.add_argument("--target", help="folder, hub id or demo:target; or a recipe names it")
    parser.add_argument("--recipe", help="recipe file with the target and settings of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="any key of the recipe, such as run.device=cpu")  # fmt: skip
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--prompts", help="a file with prompts, instead of self-drawn ones")
    parser.add_argument("--avoid", action="append", default=[], metavar="FILE",
                        help=f"prompts that no text may share {OVERLAP} tokens with")  # fmt: skip
    parser.add_argument(
        "--minutes",
        type=commands.minutes,
        help="counted from the start; the first wave is written whole. This or --waves is needed",
    )
    parser.add_argument("--waves", type=commands.count, help="write this many waves in all")
    told = partial(commands.default, _SIZES)
    parser.add_argument("--batch", type=int, help=f"texts of a wave; {told('batch')}")
    parser.add_argument("--new-tokens", type=int, help=told("new_tokens"))
    parser.add_argument("--turn-tokens", type=int, default=TURN_TOKENS, help="of self-drawn turns")
    parser.add_argument(
        "--prompt-tokens", type=int, help=f"drop longer prompts; {told('prompt_tokens')}"
    )
    parser.add_argument(
        "--shard", default="0/1", metavar="I/N", help="write every Nth wave, from I"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.minutes is None and args.waves is None:
        parser.error("say how much to write: --minutes or --waves")
    devices = [item.partition("=")[2] for item in args.set if item.startswith("run.device=")]
    commands.by_device(args, _SIZES, *devices[-1:])
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", args.shard)
    args.index, args.shards = map(int, found.groups()) if found else (0, 0)
    if args.index >= args.shards:  # shards count from 0; 3/3 would write the waves of 0/3
        parser.error(f"argument --shard: expected I/N with I < N, such as 0/3, got {args.shard}")
    return args


def engine_of(args: argparse.Namespace) -> tuple[Plan, Engine]:
    sets = {"run.batch_size": args.batch, "run.prefill_chunk": 16384}
    if args.target:
        sets["target.model"] = args.target
    sets |= {"sampling.max_new_tokens": args.new_tokens, "run.seed": args.seed}
    sets |= {"speculation.num_speculative_tokens": 0}
    longest = args.prompt_tokens + args.new_tokens
    # Most texts are shorter than the longest. A text without room is computed again later.
    blocks = max(args.batch * longest * 6 // 10, longest) // 16 + args.batch + 8
    sets["cache.num_blocks"] = blocks
    sets |= parse_sets(args.set)
    planned = plan(load_recipe(args.recipe, sets))
    return planned, build(planned, args.prompt_tokens)


def keep_frame(folder: Path, writer: Writer) -> None:
    """Keep the frame that joins texts, once for all shards. Raises `ValueError` if the folder has
    texts of another target."""
    path = folder / "frame.json"
    size = writer.planned.target.module.get_input_embeddings().weight.shape[0]
    frame = replace(writer.chat.frame, vocab_size=size)
    kept = Frame.of(path) if path.exists() else frame
    if replace(kept, vocab_size=kept.vocab_size or size) != frame:
        raise ValueError(f"{folder} has texts of another target: name another --out")
    path.write_text(json.dumps(asdict(frame)))


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    planned, engine = engine_of(args)
    writer = Writer(args, planned, engine)
    if args.index == 0:
        keep_frame(args.out, writer)
    print(f"ready after {time.perf_counter() - BEGAN:.1f} s", flush=True)
    written, waves, clock = 0, 0, time.perf_counter()
    for wave in range(args.index, args.waves or 10**9, args.shards):
        is_late = args.minutes is not None and time.perf_counter() - BEGAN > 60 * args.minutes
        if is_late and waves:
            break
        record = writer.wave(wave)
        waves += 1
        if not record.pop("is_new"):
            continue
        written += record["written"]
        spent = time.perf_counter() - BEGAN
        of = f" of {args.minutes:g} min" if args.minutes is not None else ""
        print(
            f"wave {wave} after {spent / 60:.1f}{of}: {record['texts']} texts ({record['kind']}, "
            f"temperature {record['temperature']:g}), {record['tokens']:,} tokens; "
            f"{record['looped']:,} cut off as loops, {record['overlapping']} overlapping",
            flush=True,
        )
    speed = written / (time.perf_counter() - clock)
    told = f"{counted(waves, 'wave')} in {args.out}, {written:,} tokens written"
    print(f"{told}, {speed:,.0f} tokens/s")
    if args.avoid:
        dropped = f"{writer.overlapping} prompts and texts were dropped"
        print(f"{dropped}: they share {OVERLAP} tokens with an avoided prompt")
    if torch.cuda.is_available():
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    commands.run(main)
