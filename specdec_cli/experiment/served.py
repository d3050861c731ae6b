"""Computes the metrics of points that were measured on a server."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from specdec_cli.core.figures import Acceptance, EngineFacts, InText, Metrics, Spread, acceptance_of
from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.records import Key, Sample, given
from specdec_cli.experiment.folders.samples import Samples
from specdec_cli.text import counted

# The sources of acceptance counts, from the least to the most detailed. A point's source is the
# least detailed one among those of its samples.
_SOURCES = (None, "counters", "chunks", "per_request")
_REMARKS = {
    "usage_differs": "the server's usage differs from the number of ids that it sent. Ids are "
    "counted here, so do not compare with figures that the server or its client derives from usage",
    "prefix_cache_hits": "the server found parts of prompts in its prefix cache, so first tokens "
    "came early: start it without prefix caching",
    "max_tokens_cut": "the server ended texts before max_new_tokens, because its own limit is "
    "lower. Texts are shorter than asked: start the server with room for the prompts and "
    "max_new_tokens (vLLM's --max-model-len, SGLang's --context-length), or ask for fewer",
    "max_tokens_exceeded": "the server wrote more tokens than max_new_tokens, so texts are longer "
    "than asked, and than another server's: configure it to respect the request's max_tokens",
    "context_full": "texts ended before max_new_tokens, because the context was full, so they are "
    "shorter than asked: shorten the prompts, or lower max_new_tokens",
    "repeats_propose_differently": "repeats of one prompt proposed or accepted different numbers "
    "of tokens. If the method remembers earlier runs, which wrote the same texts, its acceptance "
    "and speed are too high: forget them in its begin(), and draw with draft.draw "
    "(docs/methods.md)",
    "one_chunk": "the server sent whole texts in one chunk, so their decoding time is unknown and "
    "speeds leave them out: make it stream each token (a proxy in between may hold chunks back)",
    "counters_reset": "the server's counters were reset, so acceptance is unknown: do not restart "
    "the server while it is measured",
    "other_traffic": "the server also answered other clients, so acceptance is unknown and times "
    "include their load: measure while no other client uses the server",
    "counters_late": "the server's counters fell behind its answers, so acceptance is unknown, "
    "but times are right: measure again while the server has no other work",
    "counters_unread": "the server's counters (/metrics) could be read before its answers, but not "
    "after them, so acceptance is unknown: measure again while the server has no other work",
    "spec_details_invalid": "the server's reports on rounds contradict themselves, or the recipe's "
    "method, so its counters are used instead; without counters acceptance is unknown: name the "
    "method that the server runs, update the server, or start it without these reports (vLLM's "
    "--per-request-spec-decode-metrics)",
}


def engine_of(samples: Iterable[Sample]) -> EngineFacts | None:
    """Return the facts about a point's server; None for the native engine."""
    found = [s.engine for s in samples if s.engine is not None]
    if not found:
        return None
    source = min((one.acceptance_source for one in found), key=_SOURCES.index)
    return found[0].model_copy(update={"acceptance_source": source})


def engine_fields(samples: Collection[Sample]) -> dict[str, Any]:
    """Compute the fields of a `Point` that exist only for servers. Return an empty dict for the
    native engine.

    samples: the point's samples, including failed ones.
    """
    engine = engine_of(s for s in samples if s.could_run)
    if engine is None and (asked := engine_of(samples)) is not None:
        engine = asked.model_copy(update={"acceptance_source": None})
    if engine is None:
        return {}
    return {"engine": engine, "num_retries": sum(s.num_retries for s in samples)}


def acceptance_in(samples: Sequence[Sample], k: int, *, is_part: bool = False) -> Acceptance:
    """Compute the acceptance over some of a point's prompts, as counted by their engine.

    is_part: whether the point has other prompts too. A reading of the server's counters may then
    cover those as well, so counters are used only if each sample that needs them has its own
    reading.
    """
    engine = engine_of(samples)
    if engine is None or k == 0:
        return acceptance_of(samples, k)
    told = [s for s in samples if _tells_rounds(s)]
    rest = [s for s in samples if not _tells_rounds(s)]
    counted = [s.counted for s in rest if s.counted is not None]
    if is_part and len(counted) < len(rest):
        counted = []
    if not counted and engine.acceptance_source == "chunks":
        told, rest = list(samples), []
    if engine.acceptance_source is None or (rest and not counted):
        return Acceptance.unknown()
    if not rest and all(s.acceptance_histogram is None for s in told):
        return acceptance_of(told, k)
    histogram = [0] * (k + 1)
    proposed = 0
    for s in told:
        for place, count in enumerate(s.acceptance_histogram or ()):
            histogram[place] += count
        for count in () if s.acceptance_histogram else s.accepted_per_round:
            histogram[count] += 1
        proposed += sum(s.proposed_per_round) or k * s.num_drafts
    for one in counted:
        reached = [one.num_drafts, *one.num_accepted_tokens_per_pos, 0]
        for place in range(k + 1):
            histogram[place] += reached[place] - reached[place + 1]
        proposed += one.num_draft_tokens
    return Acceptance.of_histogram(histogram, proposed)


def _tells_rounds(sample: Sample) -> bool:
    """Return True if acceptance is taken from the sample's own rounds instead of the server's
    counters.

    If requests arrive at a rate, the counters include requests that are not measured, so the rounds
    inferred from streamed chunks are used instead.
    """
    source = sample.engine.acceptance_source if sample.engine is not None else None
    return source == "per_request" or (source == "chunks" and sample.request_rate is not None)


def in_text(samples: Iterable[Sample]) -> InText | None:
    """Compute the acceptance within texts, as the native engine counts it. Return None if the
    rounds of a text or their places are unknown, or if no round has proposals.

    The native engine never proposes the last allowed token of a text, and does not count proposals
    past the end of a text. A server may include both, so its rounds are truncated accordingly.
    """
    drafts = accepted = 0
    for sample in samples:
        has_skipped = sample.num_rounds > sample.num_drafts
        if has_skipped or (not sample.accepted_per_round and sample.decoded_tokens):
            return None
        at, most = sample.num_tokens_from_prefill, sample.max_output_tokens
        for count in sample.accepted_per_round:
            room = min(sample.k, most - at - 1)
            kept = min(count, room, sample.num_output_tokens - at)
            at += count + 1
            if room > 0 and kept >= 0:
                drafts += 1
                accepted += kept
    if not drafts:
        return None
    return InText(
        num_drafts=drafts,
        num_accepted_tokens=accepted,
        mean_acceptance_length=1 + accepted / drafts,
    )


def served_metrics(done: Sequence[Sample], key: Key) -> Metrics:
    """Compute the `metrics` of a server point, from times measured by the client."""
    decode = sum(s.usual_seconds for s in done)
    whole = sum(s.usual_mean(s.seconds) for s in done)
    rounds = sum(s.usual_mean(s.round_share) for s in done)
    tokens = sum(s.num_output_tokens for s in done)
    acceptance = acceptance_in(done, key.k)
    are_known = key.k == 0 or all(s.num_rounds or not s.decoded_tokens for s in done)
    sequence_rounds = sum(s.num_rounds for s in done)
    decoded = sum(s.decoded_tokens for s in done)
    return Metrics(
        k=key.k,
        batch_size=key.batch_size,
        num_prompts=len(done),
        num_output_tokens=tokens,
        num_rounds=round(rounds) if are_known else None,
        num_rounds_without_proposal=sum(s.num_rounds - s.num_drafts for s in done),
        round_ms=decode * 1e3 / rounds if are_known and rounds else None,
        decode_seconds=decode,
        output_tokens_per_second=tokens / whole if whole else 0.0,
        decode_tokens_per_second=decoded / decode if decode else 0.0,
        ttft_ms=Spread.of([s.usual_mean(s.ttft_ms) for s in done if s.ttft_ms]),
        tpot_ms=Spread.of([s.usual_mean(s.tpot_ms) for s in done if s.tpot_ms]),
        e2el_ms=Spread.of([s.usual_mean(s.e2el_ms) for s in done if s.e2el_ms]),
        num_tokens_from_prefill=sum(s.num_tokens_from_prefill for s in done),
        **acceptance.as_dict(),
        **given(
            in_text=in_text(done) if key.k else None,
            tokens_per_round=decoded / sequence_rounds if are_known and sequence_rounds else None,
        ),
    )


def other_engines(samples: Iterable[Samples]) -> list[Notice]:
    """Return a warning if k = 0 was measured on another engine, or another version of it, than a
    k > 0. The speed-up then compares engines, too."""
    names: dict[int, set[str]] = {}
    for sample in (one for of in samples for one in of.values() if one.could_run):
        engine = sample.engine
        name = "specdec" if engine is None else f"{engine.kind} {engine.version or ''}".strip()
        names.setdefault(sample.k, set()).add(name)
    plain = names.get(0)
    others = sorted(k for k, own in names.items() if plain is not None and own != plain)
    if plain is None or not others:
        return []
    first = others[0]
    told = (
        f"k = 0 was measured with {', '.join(sorted(plain))} and k = {first} with "
        f"{', '.join(sorted(names[first]))}, so speed-ups also compare engines: measure k = 0 on "
        "a server of the same engine and version"
    )
    return [Notice("other_engine", told, {"ks": others})]


def remarks_of(samples: Iterable[Samples]) -> list[Notice]:
    """Return one warning for each kind of remark in the samples, with the number of samples that
    have it and the prompt of the first one."""
    found: dict[str, list[Sample]] = {}
    for of in samples:
        for sample in of.values():
            for code in sample.remarks:
                found.setdefault(code, []).append(sample)
    return [
        Notice(
            code,
            f"{_REMARKS.get(code, code)} ({counted(len(of), 'sample')}, the first of prompt "
            f"{of[0].index} at k = {of[0].k})",
            {"samples": len(of), "index": of[0].index, "k": of[0].k},
        )
        for code, of in sorted(found.items())
    ]
