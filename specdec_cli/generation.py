"""Prompts in, outputs out: the text side of an engine run.

Turns prompts into requests and finished sequences into outputs. Knows nothing of terminals.
"""

from dataclasses import dataclass, replace

from specdec_cli.engine.build import Permissions, Plan, plan
from specdec_cli.engine.detokenize import StopFinder, cut_at_stop
from specdec_cli.engine.loop import Engine, Request
from specdec_cli.engine.metrics import Metrics
from specdec_cli.engine.types import Sequence
from specdec_cli.errors import UsageError
from specdec_cli.prompts import Prompt
from specdec_cli.recipe import Recipe
from specdec_cli.results import Output

_BASELINE_TOKENS = 32
_BASELINE_LEAST = 16  # tokens of a run below which a speed means nothing


@dataclass(frozen=True, slots=True)
class Job:
    """A checked pair and its tokenised prompts; no weights are loaded yet."""

    plan: Plan
    prompts: list[Prompt]
    token_ids: list[tuple[int, ...]]

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.token_ids))

    def too_long(self, prompt: int) -> str | None:
        """Why a prompt cannot run whatever the cache, or None."""
        length, most = len(self.token_ids[prompt]), self.plan.max_model_len
        if length < most:
            return None
        return f"the prompt has {length} tokens; the model's context holds {most} with the output"


def prepare(recipe: Recipe, prompts: list[Prompt], permissions: Permissions) -> Job:
    """Check the pair and tokenise. Raises `UsageError` for ids outside the vocabulary."""
    if recipe.cache.num_blocks == 1:
        raise UsageError(
            "cache.num_blocks should be at least 2: one block takes what nobody reads",
            "leave it out to take what fits",
        )
    planned = plan(recipe, permissions)
    vocab = planned.target.vocab_size
    token_ids = []
    for prompt in prompts:
        ids = prompt.token_ids
        if ids is None:
            ids = tuple(planned.tokenizer.encode(prompt.text or ""))
        if ids and max(ids) >= vocab:
            raise UsageError(
                f"prompt {prompt.index} holds token id {max(ids)}; the vocabulary ends at {vocab}"
            )
        token_ids.append(ids)
    return Job(planned, prompts, token_ids)


def requests(job: Job) -> list[Request]:
    """What the engine is to decode."""
    stop = job.plan.params.stop
    return [
        Request(
            prompt.index, ids, StopFinder(job.plan.tokenizer, ids, stop) if stop and ids else None
        )
        for prompt, ids in zip(job.prompts, job.token_ids, strict=True)
    ]


def output_of(job: Job, prompt: Prompt, seq: Sequence) -> Output:
    """The output that a finished sequence stands for."""
    assert seq.finish_reason is not None
    tokenizer = job.plan.tokenizer
    text = _text_of(job, seq)
    prompt_ids = seq.tokens[: seq.num_prompt_tokens]
    return Output(
        index=prompt.index,
        prompt=prompt.text if prompt.text is not None else tokenizer.decode(prompt_ids),
        text=text,
        prompt_token_ids=prompt_ids,
        token_ids=seq.output_ids,
        finish_reason=seq.finish_reason,
        num_drafts=len(seq.accepted_per_round),
        num_draft_tokens=sum(seq.proposed_per_round),
        num_accepted_tokens=sum(seq.accepted_per_round),
        accepted_per_round=seq.accepted_per_round,
        proposed_per_round=seq.proposed_per_round,
        category=prompt.category,
        error=seq.error,
        seconds=seq.prefill_seconds + seq.decode_seconds,
    )


def _text_of(job: Job, seq: Sequence) -> str:
    """The completion's text, up to the stop string that ended it."""
    whole, stop = job.plan.tokenizer.decode(seq.output_ids), job.plan.params.stop
    text = cut_at_stop(whole, stop)
    if seq.finish_reason == "stop" and text == whole:
        # Some tokenizers drop the space before a text's first word; behind the prompt, where the
        # stop string was found, it was there.
        text = cut_at_stop(f" {whole}", stop)[1:]
    return text


def baseline(engine: Engine, job: Job, outputs: list[Output]) -> Metrics | None:
    """A few tokens of the first prompts again at k = 0, to say whether speculation pays here.

    None when the run wrote too little to compare with.
    """
    ran = [o.index for o in outputs if o.error is None]
    params = job.plan.params
    if sum(len(o.token_ids) for o in outputs) < _BASELINE_LEAST:
        return None
    few = min(_BASELINE_TOKENS, params.max_new_tokens)  # the cache was made for no more
    params = replace(params, ignore_eos=True, stop=(), max_new_tokens=few)
    first = [
        Request(index, job.token_ids[index]) for index in ran[: job.plan.recipe.run.batch_size]
    ]
    return engine.run(first, 0, params).metrics
