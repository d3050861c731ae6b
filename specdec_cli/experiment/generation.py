"""Turns prompts into requests for an engine, and the engine's answers into outputs.

Nothing here prints to the terminal.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specdec_cli.backends.base import Backend, Finished, Prepared, Session
from specdec_cli.core.detokenize import StopFinder, Tokenizer, cut_at_stop, text_before
from specdec_cli.core.figures import Metrics, Name, Record
from specdec_cli.core.types import FinishReason, Permissions, Request
from specdec_cli.errors import UsageError, is_out_of_memory
from specdec_cli.experiment.folders.records import Sample, given
from specdec_cli.experiment.rendering import filled, texts_of
from specdec_cli.prompts import DATE_KEY, Prompt
from specdec_cli.prompts.conversations import refuse
from specdec_cli.prompts.types import PromptSet
from specdec_cli.recipe import Recipe
from specdec_cli.stages import begin_stage
from specdec_cli.text import digest, is_unicode

_log = logging.getLogger("specdec")
_ANOTHER_DAY = "2001-02-03T04:05:06"
_BASELINE_TOKENS = 32
_BASELINE_LEAST = 16  # a run with fewer tokens is not compared with k = 0


class Output(Record):
    """The output of one prompt. `error` is set if and only if `finish_reason` is
    "error"."""

    index: int
    prompt: Name
    text: Name
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_round: list[int]
    proposed_per_round: list[int]
    category: Name | None = None
    error: Name | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts rendered to text and tokenised, with a checked plan of how to run them. No weights
    are loaded yet.

    backend: the engine that made `plan` and runs it.
    plan: the checked models and settings.
    prompts: the prompts; the target's chat template has rendered their conversations to text.
    token_ids: the tokens of each prompt.
    """

    backend: Backend
    plan: Prepared
    prompts: list[Prompt]
    token_ids: list[tuple[int, ...]]

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.token_ids))

    @property
    def date(self) -> str | None:
        """The date that the chat template writes into the prompts; None if it writes none."""
        tokenizer = self.plan.tokenizer
        for prompt in self.prompts:
            if prompt.messages is None or DATE_KEY not in prompt.template:
                continue
            if DATE_KEY not in tokenizer.unread(prompt.template):
                other = replace(prompt, template={**prompt.template, DATE_KEY: _ANOTHER_DAY})
                if _rendered(tokenizer, other).text != prompt.text:
                    return str(prompt.template[DATE_KEY])
        return None

    @property
    def identity(self) -> dict[str, Any]:
        """The number of prompts, and hashes of their tokens and categories. The settings store
        these to recognise the same prompts, for example when a run is resumed.

        If the chat template writes the date, the hash covers the messages instead of the tokens,
        because a run may be resumed on another day.
        """
        found: list[Any] = list(self.token_ids)
        if self.date is not None:
            found = [
                ids if p.messages is None else [p.messages, {**p.template, DATE_KEY: None}]
                for p, ids in zip(self.prompts, self.token_ids, strict=True)
            ]
        categories = digest([prompt.category for prompt in self.prompts])
        return {"count": len(found), "sha256": digest(found), "categories": categories}

    def part(self, start: int, stop: int) -> "Job":
        """Return the job with only the prompts at positions start to stop - 1 of its list."""
        return replace(self, prompts=self.prompts[start:stop], token_ids=self.token_ids[start:stop])

    def only(self, keep: Callable[[int], bool]) -> "Job":
        """Return the job with only the prompts whose index satisfies `keep`."""
        pairs = zip(self.prompts, self.token_ids, strict=True)
        kept = [(prompt, ids) for prompt, ids in pairs if keep(prompt.index)]
        return replace(self, prompts=[p for p, _ in kept], token_ids=[ids for _, ids in kept])

    def too_long(self, prompt: int) -> str | None:
        """Explain why a prompt cannot run, however large the cache is. Return None if it can."""
        length, most = len(self.token_ids[prompt]), self.plan.max_model_len
        if length < most:
            return None
        return f"the prompt has {length} tokens, but the model's context holds {most} with output"


def prepare(backend: Backend, recipe: Recipe, prompts: PromptSet, permissions: Permissions) -> Job:
    """Check the recipe, tokenise the prompts and return the job. Log a warning if texts may outgrow
    the draft's context."""
    planned = backend.prepare(recipe, permissions)
    job = tokenised(backend, planned, prompts.prompts, skip_bad=prompts.skip_bad)
    if (warning := draft_context_warning(job.plan, job.token_ids)) is not None:
        _log.warning("%s", warning)
    return job


def tokenised(
    backend: Backend, planned: Prepared, prompts: list[Prompt], *, skip_bad: bool = False
) -> Job:
    """Render and tokenise the prompts, and return the job that runs them on the checked models in
    `planned`.

    skip_bad: whether to leave out prompts that cannot be rendered or tokenised, instead of raising
    `UsageError`. Such prompts have ids outside the vocabulary, messages without a chat template, or
    messages that the template refuses; see `refuse`.
    """
    begin_stage("tokenising the prompts")
    kept: list[tuple[Prompt, tuple[int, ...]]] = []
    bad: list[UsageError] = []
    for prompt in prompts:
        try:
            rendered = _rendered(planned.tokenizer, prompt)
            ids = _token_ids(planned, rendered)
            kept.append((replace(rendered, index=len(kept)) if skip_bad else rendered, ids))
        except UsageError as refused:
            bad.append(refused)
    refuse(bad, skip=skip_bad and bool(kept))
    found = [prompt for prompt, _ in kept]
    if (silent := next(filter(_lacks_system, found), None)) is not None:
        _log.warning("%s: the chat template leaves the system message out", silent.where)
    return Job(backend, planned, found, [ids for _, ids in kept])


def dated(recipe: Recipe, job: Job) -> Recipe:
    """Return the recipe to record, with the date that the chat template wrote into the prompts."""
    if recipe.data is None or (date := job.date) is None:
        return recipe
    return recipe.changed("data", date=date)


def draft_context_warning(planned: Prepared, token_ids: list[tuple[int, ...]]) -> str | None:
    """Return a warning if texts may outgrow the draft's context; None if all fit or there is no
    draft.

    The draft proposes nothing past its context; see `types.Sequence.room`. Even a text that ends
    one token past it loses no proposals, because its last token always comes from the target.
    """
    holds, most = planned.draft_max_len, planned.max_model_len
    if holds is None:
        return None
    new = planned.params.max_new_tokens
    runs = [len(ids) for ids in token_ids if 0 < len(ids) < most]
    ends = [min(length + new, most) for length in runs]
    past = sum(end - 1 > max(holds, length) for length, end in zip(runs, ends, strict=True))
    if past == 0:
        return None
    return (
        f"the draft's context holds {holds} tokens, beyond which it proposes nothing: {past} of "
        f"{len(token_ids)} prompts may go past it"
    )


def _rendered(tokenizer: Tokenizer, prompt: Prompt) -> Prompt:
    """Render a prompt's messages to text, if it has any, and return the prompt with this text."""
    if prompt.messages is None:
        return prompt
    try:
        text = filled(tokenizer, prompt.messages, prompt.template)
    except UsageError as refused:
        hint = refused.hint
        if hint is None and any(m["role"] == "system" for m in prompt.messages):
            hint = "many templates take no system message: put it into the first user message"
        raise UsageError(f"{prompt.where}: {refused.message}", hint) from None
    if not text or not is_unicode(text):
        what = "text that is not valid Unicode" if text else "an empty text"
        raise UsageError(f"{prompt.where}: the chat template turns the messages into {what}")
    return replace(prompt, text=text)


def _token_ids(planned: Prepared, prompt: Prompt) -> tuple[int, ...]:
    ids, vocab = prompt.token_ids, planned.vocab_size
    if ids is None:
        # The template already writes the special tokens; the tokenizer would add the first one
        # again.
        is_rendered = prompt.messages is not None
        assert prompt.text is not None
        ids = tuple(planned.tokenizer.encode(prompt.text, add_special_tokens=not is_rendered))
    if ids and max(ids) >= vocab:
        raise UsageError(
            f"{prompt.where}: prompt {prompt.index} contains token id {max(ids)}, "
            f"but the vocabulary has only {vocab} ids",
            "leave the prompt out, or encode it with this target's tokenizer",
        )
    return ids


def _lacks_system(prompt: Prompt) -> bool:
    """True if a rendered conversation has a system message that is missing from its text."""
    texts = [text for m in prompt.messages or () if m["role"] == "system" for text in texts_of(m)]
    return any(text.strip() not in (prompt.text or "") for text in texts)


def requests(job: Job) -> list[Request]:
    """Make the engine's requests for the job's prompts."""
    stop = job.plan.params.stop
    decoder = job.plan.tokenizer.finding(stop)
    return [
        Request(
            prompt.index,
            ids,
            partial(StopFinder, decoder, ids, stop) if stop and ids else None,
        )
        for prompt, ids in zip(job.prompts, job.token_ids, strict=True)
    ]


def output_of(job: Job, prompt: Prompt, answer: Finished | Sample, seconds: float) -> Output:
    """Make a prompt's output from its request's result, or from its sample in an earlier run."""
    accepted, proposed = answer.accepted_per_round or [], answer.proposed_per_round or []
    tokenizer, stop, shown = job.plan.tokenizer, job.plan.params.stop, prompt.text
    of_server = answer if isinstance(answer, Sample) else answer.served
    text = of_server.text if of_server is not None else None  # set if a server sent text but no ids
    if not text and answer.finish_reason == "stop":
        text = text_before(tokenizer, answer.prompt_token_ids, answer.token_ids, stop)
    elif not text:
        text = cut_at_stop(tokenizer.decode(answer.token_ids), stop)
    return Output(
        index=prompt.index,
        prompt=tokenizer.decode(answer.prompt_token_ids) if shown is None else shown,
        text=text,
        prompt_token_ids=answer.prompt_token_ids,
        token_ids=answer.token_ids,
        finish_reason=answer.finish_reason,
        num_drafts=len(accepted),
        num_draft_tokens=sum(proposed),
        num_accepted_tokens=sum(accepted),
        accepted_per_round=accepted,
        proposed_per_round=proposed,
        seconds=seconds,
        **given(category=prompt.category, error=answer.error),
    )


def baseline(session: Session, job: Job, outputs: list[Output]) -> Metrics | None:
    """Decode a few tokens of the first prompts at k = 0, to tell whether speculation pays. Return
    None if the run generated too little for a comparison, or left too little memory for rounds at
    k = 0."""
    ran = [o.index for o in outputs if o.error is None]
    params = job.plan.params
    if sum(len(o.token_ids) for o in outputs) < _BASELINE_LEAST:
        return None
    few = min(_BASELINE_TOKENS, params.max_new_tokens)  # the cache is sized for max_new_tokens
    params = replace(params, ignore_eos=True, stop=(), max_new_tokens=few)
    first = [
        Request(index, job.token_ids[index]) for index in ran[: job.plan.recipe.run.batch_size]
    ]
    try:
        return session.run(first, 0, params, lambda *_: None)
    except Exception as problem:
        if job.plan.num_ranks > 1 or not is_out_of_memory(problem):
            raise  # returning on one rank alone would leave the other ranks waiting for it
        return None
