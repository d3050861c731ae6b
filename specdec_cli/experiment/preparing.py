"""Settings and warnings common to all runs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specdec_cli.backends.base import Prepared
from specdec_cli.core.types import cached_positions
from specdec_cli.errors import Notice
from specdec_cli.experiment.generation import Job, Output
from specdec_cli.experiment.load.arrivals import process_of
from specdec_cli.experiment.statistics.stats import FEWEST
from specdec_cli.models.generation_config import file_of, in_words, recommended, unsupported
from specdec_cli.prompts import DATE_KEY
from specdec_cli.recipe import Recipe
from specdec_cli.text import counted, digest

_FEW_PROMPTS = 20
_USUAL_PENALTY = 1.2  # repetition penalty to suggest; 1.1 does not end the demo target's loops
# An output loops if at least _LEAST_LOOP tokens at its end repeat a sequence of at most
# _LONGEST_TURN tokens at least _TURNS times.
_TURNS, _LEAST_LOOP, _LONGEST_TURN = 4, 32, 64


def with_weights(section: dict[str, Any], plan: Prepared, role: str) -> dict[str, Any]:
    """Return a model's section of the recipe in the form that the settings store.

    If the model takes part in the run, `weights` becomes the fingerprint of its weights, and the
    recipe's own value of `weights` moves to `weights_as`, unless it is `auto`.
    """
    found, form = plan.fingerprint(role), section["weights"]
    if found is None:
        return section
    return section | {"weights": found} | ({} if form == "auto" else {"weights_as": form})


def common_settings(
    recipe: Recipe, job: Job, roles: Sequence[str] = ("target", "draft")
) -> dict[str, Any]:
    """Build the fields of `RunSettings`.

    roles: the models whose sections get fingerprints of their weights.
    """
    values = recipe.model_dump(mode="json")
    del values["data"], values["run"]["batch_size"], values["run"]["device"]
    if recipe.engine.kind == "native":
        del values["engine"]
    if recipe.load.request_rate is None:
        del values["load"]
    elif times := process_of(recipe.load.arrivals).times:
        values["load"]["times"] = digest(times)
    if job.plan.plugins:  # `remark` is not None if an acceptance rule changes the text
        values["plugins"] = {"files": dict(job.plan.plugins), "remark": job.plan.remark}
    for role in roles:
        if values[role] is not None:
            values[role] = with_weights(values[role], job.plan, role)
    return {
        "recipe": values,
        "prompts": job.identity,
        "device": job.plan.device_name,
        "dtype": job.plan.dtype_name,
    }


def warnings_of_job(job: Job, chat: str) -> list[Notice]:
    """Return warnings about conditions that may make a run slow or its text unexpected:
    - few threads
    - a cache dtype that changes the text
    - sampling settings other than those that the target recommends
    - prompts in which the first token (BOS) occurs twice
    - a chat template that is not used, although the user did not choose plain text
    - template values that the template never reads

    chat: the value of `data.chat`; `auto` means that the user did not choose.
    """
    tokenizer, count, found = job.plan.tokenizer, len(job.prompts), other_sampling(job.plan)
    if job.plan.few_threads is not None:
        found.append(job.plan.few_threads)
    if (kind := job.plan.recipe.cache.dtype) != "auto" and job.backend.holds_caches:
        told = (
            f"the cache holds keys and values in {kind} (cache.dtype), which changes the text. It "
            "is the text of plain decoding with this cache, not with cache.dtype: auto. Compare "
            "only runs of the same cache.dtype, and check the text before using it"
        )
        found.append(Notice("rounded_cache", told, {"dtype": kind}))
    first = tuple(tokenizer.encode("")[:1])
    pairs = zip(job.prompts, job.token_ids, strict=True)
    plain = [pair for pair in pairs if pair[0].token_ids is None and pair[0].messages is None]
    twice = sum(bool(first) and ids[:2] == first * 2 for _, ids in plain)
    if twice:
        told = (
            f"{twice} of {count} prompts begin with the token that the tokenizer puts first (BOS), "
            "and get it twice: leave it out, or give messages and let --chat write it"
        )
        found.append(Notice("first_token_twice", told, {"prompts": twice, "num_prompts": count}))
    # Assume that a chat template was already applied to texts that begin with a special token.
    marks = tuple(tokenizer.special_tokens)
    without = sum(not (prompt.text or "").startswith(marks) for prompt, _ in plain)
    if chat == "auto" and without and tokenizer.has_template:
        told = (
            f"the target has a chat template, but {without} of {count} prompts do not use it: pass "
            "--chat to use it, or --no-chat if plain text is meant"
        )
        evidence = {"without": without, "num_prompts": count}
        found.append(Notice("no_chat_template", told, evidence))
    given = [p.template for p in job.prompts if p.messages is not None and p.template]
    counts = Counter(name for template in given for name in tokenizer.unread(template))
    counts.pop(DATE_KEY, None)  # the user did not ask for it
    if counts:
        told = ", ".join(f"{name} ({rows} of {count} prompts)" for name, rows in counts.items())
        found.append(
            Notice(
                "unread_by_template",
                f"the chat template never reads {told}: leave it out, or pass a "
                "--chat-template that does",
                dict(counts),
            )
        )
    return found


def other_sampling(plan: Prepared) -> list[Notice]:
    """Return a warning if the target's generation_config.json recommends sampling settings that are
    unsupported or differ from the run's."""
    stored, params = plan.generation_config, plan.params
    asked, others = recommended(stored), unsupported(stored)
    used = {key: getattr(params, key) for key in asked}
    differing = {key: value for key, value in used.items() if value != asked[key]}
    if not differing and not others:
        return []
    parts = list[str]()
    if differing:
        parts.append(
            f"recommends {in_words({key: asked[key] for key in differing})}, and "
            f"{in_words(differing)} is used: --set sampling.from=model takes the model's"
        )
    if others:
        parts.append(f"asks for {in_words(others)}, which is not supported and has no effect")
    evidence = {"recommended": asked, "used": used, "unsupported": others}
    said = f"the target's {file_of(stored)} {'; it '.join(parts)}"
    return [Notice("generation_config", said, evidence)]


def unlisted_end(job: Job, outputs: Sequence[Output]) -> list[Notice]:
    """Return a warning if texts reached max_new_tokens and the tokenizer's end-of-sequence token is
    not one of the tokens that end a text in this run."""
    end, plan = job.plan.tokenizer.end_token, job.plan
    long = sum(out.finish_reason == "length" for out in outputs)
    if end is None or not long or plan.params.ignore_eos or end[0] in plan.eos_ids:
        return []
    told = (
        f"{long} of {len(outputs)} texts reached max_new_tokens, and the tokenizer's end token, "
        f"{end[1]} (id {end[0]}), does not end texts: generation_config.json does not list it in "
        f"eos_token_id; add it there, or set sampling.stop: ['{end[1]}']"
    )
    return [Notice("end_token_unlisted", told, {"token_id": end[0], "texts": long})]


def looped(job: Job, outputs: Sequence[Output]) -> list[Notice]:
    """Return a warning if texts end in a loop, which drafts predict unusually well."""
    plan = job.plan
    found = sum(out.finish_reason == "length" and _ends_in_loop(out.token_ids) for out in outputs)
    is_greedy = plan.params.temperature == 0
    if not found or plan.params.ignore_eos or "target" in plan.random_roles:
        return []
    if not is_greedy and 2 * found < len(outputs):
        return []
    penalty = max(_USUAL_PENALTY, plan.params.repetition_penalty + 0.1)  # above the run's own
    often, remedy = "", f"--set sampling.repetition_penalty={penalty:g}"
    if is_greedy:
        often = ", as greedy text of small models often does"
        remedy = f"--temperature 0.7, or {remedy}"
        if plan.recipe.target.model == "demo:target":
            remedy = f"the recipe demo-sampled, {remedy}"
    told = (
        f"{found} of {len(outputs)} texts end in a loop{often}, and acceptance is high there: try "
        f"{remedy}"
    )
    return [Notice("texts_loop", told, {"texts": found})]


def _ends_in_loop(ids: Sequence[int]) -> bool:
    """Return True if at least `_LEAST_LOOP` tokens at the end repeat one sequence of tokens
    `_TURNS` times or more."""
    for period in range(1, min(_LONGEST_TURN, len(ids) // _TURNS) + 1):
        tail = ids[-max(_TURNS * period, _LEAST_LOOP) :]
        if len(tail) >= _LEAST_LOOP and tail[period:] == tail[:-period]:
            return True
    return False


def few_prompts(count: int) -> list[Notice]:
    """Return a warning if there are too few prompts for intervals, or so few that intervals are
    wide."""
    if count >= _FEW_PROMPTS:
        return []
    few = "1 prompt is" if count == 1 else f"{count} prompts are"
    what = "too few for intervals" if count < FEWEST else "few: intervals are wide"
    told = f"{few} {what} (--limit, --dataset)"
    return [Notice("few_prompts", told, {"num_prompts": count})]


def too_long(jobs: Sequence[Job], count: int | None = None) -> list[Notice]:
    """Return a warning if some prompts are too long for the context or, with their new tokens and
    the proposals of a draft, for the recipe's number of blocks. These fail when their turn comes,
    which may be hours later.

    jobs: the same prompts with each draft.
    count: how many of the first prompts run; None for all.
    """
    job = jobs[0]
    plan, cache = job.plan, job.plan.recipe.cache
    context, new = plan.max_model_len, plan.params.max_new_tokens
    blocks = cache.num_blocks if job.backend.is_native else None
    drafts = {(one.plan.ahead, one.plan.draft_max_len or 0) for one in jobs}

    def fits(n: int) -> bool:
        if n >= context or blocks is None:
            return n < context
        most = max(cached_positions(n, min(n + new, context), *draft) for draft in drafts)
        return most <= (blocks - 1) * cache.block_size

    lengths = [len(ids) for ids in job.token_ids[:count]]
    outside = [n for n in lengths if not fits(n)]
    if not outside:
        return []
    longest, limit = max(outside), f"the context has {context}"
    if longest < context:
        block = " and a draft's block" if any(ahead for ahead, _ in drafts) else ""
        limit = f"with up to {new} new ones{block} they exceed {blocks} blocks of "
        limit += f"{cache.block_size}"
    few = f"{len(outside)} of {counted(len(lengths), 'prompt')} cannot run"
    told = f"{few}: the longest has {longest} tokens, and {limit}: leave long prompts out"
    evidence = {"prompts": len(outside), "num_prompts": len(lengths), "longest": longest}
    return [Notice("prompts_too_long", told, evidence)]
