"""The client against the fake: every misbehaviour of a server becomes what the docs promise."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import aiohttp
import pytest

from specdec_cli.backends.base import Finished
from specdec_cli.backends.server import times
from specdec_cli.backends.server.answers import Rounds, chunks_tell, finished
from specdec_cli.backends.server.client import Answer, Events, Limits
from specdec_cli.backends.server.detect import look_at
from specdec_cli.backends.server.dialects import Reading, ServerFacts
from specdec_cli.backends.server.process import HOST, free_port
from specdec_cli.backends.server.session import Line, ServerSession
from specdec_cli.core.figures import Metrics
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.errors import SetupError
from specdec_cli.experiment.folders.records import Key, Sample
from specdec_cli.experiment.measure import sample_of
from specdec_cli.experiment.served import served_metrics
from tests.server.fake_server import FakeServer, Faults, running

VOCABULARY = 4096
PARAMS = SamplingParams(max_new_tokens=12)
DIALECTS = ["vllm", "sglang"]


@contextmanager
def session_of(
    server: FakeServer, batch: int = 1, timeout_s: float = 5.0, context: int = 512
) -> Iterator[Any]:
    line = Line()
    with running(server):
        try:
            facts = line.run(lambda http: look_at(http, server.url, None, 1.0))
            k = server.k if facts.k is None else facts.k
            session = ServerSession(
                {k: facts}, batch, context, VOCABULARY, Limits(timeout_s, 2), (), line
            )

            def ask(count: int = 3, params: SamplingParams = PARAMS) -> list[Finished]:
                found: list[Finished] = []
                requests = [Request(i, tuple(range(3, 8 + i))) for i in range(count)]
                session.run(requests, k, params, lambda _, done: found.extend(done))
                return found

            yield ask
        finally:
            line.close()


def source(answers: list[Finished]) -> str | None:
    assert answers[0].served is not None
    return answers[0].served.engine.acceptance_source


def remarks(answers: list[Finished]) -> set[str]:
    return {code for a in answers if a.served is not None for code in a.served.remarks}


def retries(answers: list[Finished]) -> int:
    return sum(a.served.num_retries for a in answers if a.served is not None)


def assert_true(server: FakeServer, answers: list[Finished]) -> None:
    """The answers hold what the server wrote."""
    for answer in answers:
        (truth,) = [w for w in server.written if w.prompt == answer.prompt_token_ids][-1:]
        assert answer.error is None and answer.token_ids == truth.tokens


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("batch", [1, 4])
def test_ids_rounds_and_times_are_the_servers(dialect: str, batch: int) -> None:
    server = FakeServer(dialect, k=3)
    with session_of(server, batch) as ask:
        answers = ask(6)
    assert_true(server, answers)
    assert source(answers) == ("chunks" if dialect == "vllm" else "per_request")
    waits, stretches = [], []  # of the client's clock beyond the server's, in ms
    for answer in answers:
        (truth,) = [w for w in server.written if w.prompt == answer.prompt_token_ids]
        kept = truth.rounds if dialect == "sglang" else _in_text(truth.rounds, len(truth.tokens))
        assert answer.accepted_per_round == kept
        sent = [(at - truth.arrived) * 1e3 for at in truth.chunk_times]
        assert answer.served is not None and answer.served.e2el_ms is not None
        assert answer.ttft_ms is not None
        # The client's clock runs from before the server has the request; both share a processor.
        assert sent[0] < answer.ttft_ms and sent[-1] < answer.served.e2el_ms
        span = answer.served.e2el_ms - answer.ttft_ms
        waits.append(answer.ttft_ms - sent[0])
        stretches.append(abs(span - (sent[-1] - sent[0])))
        assert answer.tpot_ms == pytest.approx(span / (len(truth.tokens) - 1))
        assert answer.max_output_tokens == PARAMS.max_new_tokens
    # Another program may stop this one for a moment, so that one answer is late.
    assert median(waits) < 40 and median(stretches) < 20
    # Each instant is charged once, however many decode.
    first = min(a.first_token_at or 0.0 for a in answers)
    last = max(a.finished_at or 0.0 for a in answers)
    total = sum(a.decode_seconds for a in answers)
    assert total <= last - first + 1e-9
    if batch == 1:
        spans = [(a.finished_at or 0.0) - (a.first_token_at or 0.0) for a in answers]
        assert [a.decode_seconds for a in answers] == pytest.approx(spans)


def _in_text(rounds: list[int], tokens: int) -> list[int]:
    """Accepted tokens of each round, as far as they lie in a text of `tokens` tokens."""
    found, at = [], 1
    for accepted in rounds:
        found.append(min(accepted + 1, tokens - at) - 1)
        at += accepted + 1
    return found


def test_sampling_is_sent_in_full_and_every_request_has_a_salt() -> None:
    params = SamplingParams(0.7, 5, 0.9, 4, True, ("x",), 11, 1.3, (), 2)
    for dialect in DIALECTS:
        server = FakeServer(dialect)
        with session_of(server) as ask:
            ask(2, params)
            ask(2, params)
        bodies = [w.body for w in server.written]
        assert len({w.salt for w in server.written}) == 4
        own = [b if dialect == "vllm" else b["sampling_params"] for b in bodies]
        for one in own:
            assert (one["temperature"], one["top_k"], one["top_p"]) == (0.7, 5, 0.9)
            assert one["min_p"] == 0, "generation_config.json may have another"
            assert one["repetition_penalty"] == 1.3 and one["ignore_eos"] and one["stop"] == ["x"]
            assert one["min_tokens" if dialect == "vllm" else "min_new_tokens"] == 2
        seeds = [one["seed" if dialect == "vllm" else "sampling_seed"] for one in own]
        assert seeds == [11, 12, 11, 12]


def test_greedy_sends_words_for_no_top_k() -> None:
    for dialect, word in (("vllm", 0), ("sglang", -1)):
        server = FakeServer(dialect)
        with session_of(server) as ask:
            ask(1)
        body = server.written[0].body
        assert (body if dialect == "vllm" else body["sampling_params"])["top_k"] == word


def test_detailed_vllm_tells_each_request_and_k_0_needs_no_rounds() -> None:
    server = FakeServer("vllm", detailed=True)
    with session_of(server, 4) as ask:
        answers = ask(6)
    assert_true(server, answers)
    assert source(answers) == "per_request"
    rounds = {tuple(w.prompt): w.rounds for w in server.written}
    assert all(a.accepted_per_round == rounds[tuple(a.prompt_token_ids)] for a in answers)
    plain = FakeServer("vllm", k=0)
    with session_of(plain) as ask:
        answers = ask(2)
    assert source(answers) is None and answers[0].rounds_without_proposal == 12


def test_counters_sum_over_engines() -> None:
    server = FakeServer("vllm", engines=2)
    with session_of(server, 2) as ask:
        answers = ask(4)
    assert source(answers) == "chunks"
    counted = answers[-1].served.counted if answers[-1].served is not None else None
    assert counted is not None
    assert counted.num_drafts == sum(len(w.rounds) for w in server.written)
    every = [a for w in server.written for a in w.rounds]
    assert counted.num_accepted_tokens_per_pos == [sum(a > i for a in every) for i in range(3)]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_failures_in_passing_are_tried_again(dialect: str, status: int) -> None:
    server = FakeServer(dialect, faults=Faults(statuses=[(status, {})]))
    with session_of(server) as ask:
        answers = ask(2)
    assert_true(server, answers)
    assert retries(answers) == 1 and server.asked == 3


def test_retry_after_is_kept() -> None:
    server = FakeServer(faults=Faults(statuses=[(503, {"Retry-After": "0.3"})]))
    with session_of(server) as ask:
        (answer,) = ask(1)
    assert answer.admitted_at is not None and answer.admitted_at - answer.arrived_at > 0.3
    assert answer.ttft_ms is not None and answer.ttft_ms < 200  # of the attempt that was answered


@pytest.mark.parametrize("wait", ["soon", "Mon, 01 Jan 99999999999 00:00:00 GMT"])
def test_an_impossible_retry_after_is_ignored(wait: str) -> None:
    server = FakeServer(faults=Faults(statuses=[(503, {"Retry-After": wait})]))
    with session_of(server) as ask:
        assert_true(server, ask(1))


def test_other_refusals_are_not_tried_again_and_quote_the_server() -> None:
    server = FakeServer(faults=Faults(statuses=[(400, {})]))
    with session_of(server) as ask:
        answers = ask(2)
    assert [a.finish_reason for a in answers] == ["error", "length"]
    assert "HTTP 400" in str(answers[0].error) and "planted 400" in str(answers[0].error)
    assert server.asked == 2 and retries(answers) == 0


def test_attempts_end() -> None:
    server = FakeServer(faults=Faults(statuses=[(500, {})] * 3))
    with session_of(server) as ask:
        answers = ask(1)
    assert answers[0].error is not None and "planted 500" in answers[0].error
    assert server.asked == 3 and retries(answers) == 2


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "fault",
    [
        *({"cut": 1}, {"cut": 1, "clean": False}, {"error_event": 1}, {"abort": 1}),
        *({"no_done": 1}, {"no_reason": 1}, {"abort": 1, "end": "error"}),
    ],
)
def test_streams_that_break_are_no_answers(dialect: str, fault: dict[str, Any]) -> None:
    server = FakeServer(dialect, faults=Faults(**fault))
    with session_of(server) as ask:
        answers = ask(2)
    assert_true(server, answers)
    assert retries(answers) == 1


def test_a_refused_connection_is_tried_again() -> None:
    """A server that has ended refuses connections in this way."""
    line, url = Line(), f"http://{HOST}:{free_port()}"
    facts = ServerFacts(url=url, kind="vllm", version=None, k=3, method=None, model="demo")
    session = ServerSession({3: facts}, 1, 512, VOCABULARY, Limits(5.0, 2), (), line)
    found: list[Finished] = []
    session.run([Request(0, (3, 4))], 3, PARAMS, lambda _, done: found.extend(done))
    line.close()
    assert retries(found) == 2 and "Cannot connect" in str(found[0].error)


def test_a_broken_stream_says_what_the_server_said() -> None:
    server = FakeServer(faults=Faults(error_event=3))
    with session_of(server) as ask:
        (answer,) = ask(1)
    assert "planted in the stream" in str(answer.error)


def test_a_hanging_request_ends_at_its_timeout() -> None:
    server = FakeServer(faults=Faults(hang=1))
    with session_of(server, timeout_s=0.3) as ask:
        answers = ask(2)
    assert "request_timeout_s" in str(answers[0].error) and answers[1].error is None
    assert server.asked == 2


def test_ids_win_over_usage() -> None:
    for dialect in DIALECTS:
        server = FakeServer(dialect, faults=Faults(usage=5))
        with session_of(server) as ask:
            answers = ask(1)
        assert_true(server, answers)
        assert remarks(answers) == {"usage_differs"}
    server = FakeServer(faults=Faults(usage=None))
    with session_of(server) as ask:
        answers = ask(1)
    assert_true(server, answers)
    assert remarks(answers) == set()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_empty_chunks_are_no_first_token(dialect: str) -> None:
    server = FakeServer(dialect, faults=Faults(early_empty=0.1))
    with session_of(server) as ask:
        (answer,) = ask(1)
    assert answer.ttft_ms is not None and answer.ttft_ms > 100
    assert answer.num_tokens_from_prefill == 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_pieces_comments_and_line_ends_change_nothing(dialect: str) -> None:
    server = FakeServer(dialect, faults=Faults(pieces=23))
    with session_of(server, 2) as ask:
        answers = ask(3)
    assert_true(server, answers)
    assert source(answers) == ("chunks" if dialect == "vllm" else "per_request")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_may_be_split_anywhere(end: str) -> None:
    """The kernel may join pieces that a server writes one by one, so parts are fed here."""
    lines = [
        ": a comment",
        'data: {"a": 1}',
        "",
        "id: 7",
        "data:b",
        "data:  c",
        "",
        "",
        "data: d",
        "",
    ]
    stream = end.join([*lines, ""]).encode()
    for size in range(1, len(stream) + 1):
        events = Events()
        parts = [stream[at : at + size] for at in range(0, len(stream), size)]
        # A carriage return may be the first half of a line end, so the next piece tells.
        found = [data for part in [*parts, b":"] for data in events.feed(part)]
        assert found == [b'{"a": 1}', b"b\n c", b"d"], f"pieces of {size} bytes"


FACTS = ServerFacts("http://h", "vllm", "0.29", 3, None, "demo")


def answered(sizes: list[int], rounds: Rounds, *, may_skip: bool = False) -> Sample:
    """The sample of an answer whose chunks come every 10 ms."""
    ids = list(range(sum(sizes)))
    reading = Reading(token_ids=ids, finish_reason="length")
    chunks = [(0.01 * place, size) for place, size in enumerate(sizes)]
    answer = Answer(Request(0, (1, 2)), 0.0, reading=reading, chunks=chunks)
    span = chunks[-1][0]
    made = finished(
        *(answer, FACTS, 3, "per_request", rounds, (span, span), 512), may_skip=may_skip
    )
    key = Key(draft="d", k=3, batch_size=1)
    return sample_of(key, None, [made], 512, 0)


def metrics(sample: Sample) -> Metrics:
    return served_metrics([sample], Key(draft="d", k=3, batch_size=1))


def test_rounds_without_proposals_count() -> None:
    """Servers report the rounds that proposed alone, 5 of these 85."""
    sizes = [1] * 41 + [4] * 5 + [1] * 40
    for rounds in (Rounds(([3] * 5, [3] * 5)), Rounds(histogram=[0, 0, 0, 5])):
        found = metrics(answered(sizes, rounds, may_skip=True))
        assert found.tokens_per_round == pytest.approx(100 / 85)
        assert found.round_ms == pytest.approx(10) and found.num_rounds_without_proposal == 80
        assert found.mean_acceptance_length == 4 and found.in_text is None, "places are unknown"
    none = metrics(answered([1] * 11, Rounds(([], [])), may_skip=True))
    assert (none.tokens_per_round, none.round_ms) == (1, pytest.approx(10))
    assert metrics(answered(sizes, Rounds(), may_skip=True)).tokens_per_round is None


def test_rounds_in_the_first_chunk_took_none_of_the_time() -> None:
    """A slow reader gets the prefill's token and the first round, of four tokens, at once."""
    sizes = [5, 1, 1, 4]
    sample = answered(sizes, Rounds(([3, 0, 0, 3], [3] * 4)))
    assert (sample.accepted_per_round, sample.num_tokens_from_prefill) == ([0, 0, 3], 5)
    found = metrics(sample)
    assert (found.round_ms, found.tokens_per_round) == (pytest.approx(10), 2)
    assert found.in_text is not None
    assert (found.in_text.num_drafts, found.in_text.num_accepted_tokens) == (3, 3)
    # Where the order is unknown, six of the ten tokens after the prefill's took the time.
    sample = answered(sizes, Rounds(histogram=[2, 0, 0, 2]))
    assert sample.round_share == pytest.approx([0.6 * 4])


@pytest.mark.parametrize("chunks", [[(0.01, 0)], []])
def test_a_text_in_one_chunk_has_no_time_of_decoding(chunks: list[tuple[float, int]]) -> None:
    for usage, told in ((12, {"one_chunk"}), (4, set())):
        reading = Reading(text="text", usage=usage, finish_reason="stop")
        answer = Answer(Request(0, (1, 2)), 0.0, reading=reading, chunks=chunks)
        made = finished(answer, FACTS, 3, None, Rounds(), (0.0, 0.01), 12, may_skip=False)
        assert made.num_tokens_from_prefill == usage and remarks([made]) == told


def test_proposals_of_a_tree_are_not_a_chain_s() -> None:
    server = FakeServer("sglang", k=3, topk=5)
    with session_of(server, 2) as ask:
        answers = ask(4)
    assert not remarks(answers) and source(answers) == "per_request"
    truth = {tuple(w.prompt): w.rounds for w in server.written}
    for answer in answers:
        assert answer.accepted_per_round == truth[tuple(answer.prompt_token_ids)]


@pytest.mark.parametrize("topk", [1, 10])
@pytest.mark.parametrize("k", [1, 3, 9, 12])
def test_k_of_sglang_s_n_grams(k: int, topk: int) -> None:
    """Their steps are the tokens divided by the breadth."""
    server, line = FakeServer("sglang", k=k, algorithm="NGRAM", topk=topk), Line()
    with running(server):
        assert line.run(lambda http: look_at(http, server.url, None, 1.0)).k == k
    line.close()


@pytest.mark.parametrize("steps", ["3", [3], -3, 10**9, True])
def test_a_k_that_is_no_number_is_not_known(steps: Any) -> None:
    for tokens in (steps, None):
        told = {"speculative_num_steps": steps, "speculative_num_draft_tokens": tokens}
        assert _facts(FakeServer("sglang", info=told)).k is None


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("told", [7, ["1"], {"a": "1"}, " ", None])
def test_a_version_that_is_no_text_is_not_known(dialect: str, told: Any) -> None:
    server = FakeServer(dialect, k=3, info={"version": told})
    with session_of(server) as ask:
        answers = ask(1)
    assert answers[0].error is None and _facts(server).version is None


@pytest.mark.parametrize("told", [0, -5, True, "512", None])
def test_a_context_that_is_no_length_is_not_known(told: Any) -> None:
    assert _facts(FakeServer(model={"max_model_len": told})).max_model_len is None


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
@pytest.mark.parametrize("place", ['{position="x"}', "", '{position="²"}'])
def test_counters_without_a_number_or_a_place_tell_nothing(value: str, place: str) -> None:
    names = ("drafts", "draft_tokens", "accepted_tokens")
    lines = [f"vllm:spec_decode_num_{name}_total {value}" for name in names]
    lines += [f"vllm:generation_tokens_total {value}"]
    lines += [f"vllm:spec_decode_num_accepted_tokens_per_pos_total{place} 1.0"]
    server = FakeServer(metrics="\n".join(lines) + "\n")
    assert _facts(server).k == 0
    with session_of(server) as ask:
        answers = ask(2)
    assert [a.error for a in answers] == [None, None] and source(answers) is None


def test_json_that_is_nested_too_deeply_is_no_answer() -> None:
    deep = "[" * 100_000
    with pytest.raises(SetupError, match="lists no model"):
        _facts(FakeServer(page=deep))
    with patch("tests.server.fake_server.json.dumps", return_value=deep):
        with session_of(FakeServer()) as ask:
            answers = ask(1)
    assert answers[0].error == "the server sent an event that is nested too deeply"


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/metrics", "/version"])
def test_a_path_that_hangs_is_told_as_one(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(times, "SHORT_S", 0.05)
    server = FakeServer(mute=path)
    with pytest.raises(SetupError, match=f"at http.* does not answer {path} within 0.05 s") as told:
        _facts(server)
    assert server.url in told.value.message


def _facts(server: FakeServer) -> ServerFacts:
    line = Line()
    with running(server):
        try:
            return line.run(lambda http: look_at(http, server.url, None, 1.0))
        finally:
            line.close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_more_is_asked_for_than_the_context_holds(dialect: str) -> None:
    """Servers refuse a request that could exceed it. SGLang's EAGLE keeps k + 1 tokens of it."""
    server = FakeServer(dialect, k=3)
    with session_of(server, context=16) as ask:
        answers = ask(2, replace(PARAMS, min_new_tokens=PARAMS.max_new_tokens))
    asked = [w.body if dialect == "vllm" else w.body["sampling_params"] for w in server.written]
    name = "max_tokens" if dialect == "vllm" else "max_new_tokens"
    most = [11, 10] if dialect == "vllm" else [7, 6]
    assert [one[name] for one in asked] == [a.max_output_tokens for a in answers] == most
    assert not remarks(answers)


@pytest.mark.parametrize("merge", [2, 3])
def test_merged_chunks_tell_no_rounds(merge: int) -> None:
    server = FakeServer(faults=Faults(merge=merge))
    with session_of(server, 2) as ask:
        answers = ask(4)
    assert_true(server, answers)
    assert source(answers) == "counters"
    assert all(a.accepted_per_round == [] and a.round_share == 0 for a in answers)
    server = FakeServer("sglang", faults=Faults(merge=merge))
    with session_of(server, 2) as ask:
        answers = ask(4)
    assert source(answers) == "per_request"
    truth = {tuple(w.prompt): w.rounds for w in server.written}
    for answer in answers:
        assert answer.served is not None and answer.accepted_per_round == []
        rounds = truth[tuple(answer.prompt_token_ids)]
        assert answer.served.acceptance_histogram == [rounds.count(i) for i in range(4)]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_rounds_in_two_chunks_tell_no_rounds(dialect: str) -> None:
    server = FakeServer(dialect, faults=Faults(split=True))
    with session_of(server, 2) as ask:
        answers = ask(4)
    assert_true(server, answers)
    assert source(answers) == ("counters" if dialect == "vllm" else "per_request")
    assert all(a.accepted_per_round == [] for a in answers)


def test_incremental_streams_of_sglang() -> None:
    server = FakeServer("sglang", incremental=True)
    with session_of(server) as ask:
        answers = ask(3)
    assert_true(server, answers)
    assert source(answers) == "per_request"


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"reset_after": 1}, "counters_reset"),
        ({"foreign": 7}, "other_traffic"),
        ({"unread_after": 1}, "counters_unread"),
    ],
)
def test_counters_that_cannot_be_trusted_give_nothing(fault: dict[str, Any], code: str) -> None:
    server = FakeServer(faults=Faults(**fault))
    with session_of(server, 2) as ask:
        answers = ask(4)
    assert_true(server, answers)
    assert source(answers) is None and remarks(answers) == {code}
    assert all(a.served is not None and a.served.counted is None for a in answers)


@pytest.mark.parametrize("k", [0, 3])
def test_others_are_told_where_counters_are_not_needed(k: int) -> None:
    server = FakeServer(k=k, detailed=True, faults=Faults(foreign=7))
    with session_of(server) as ask:
        answers = ask(2)
    assert remarks(answers) == {"other_traffic"}
    assert source(answers) == ("per_request" if k else None)


def test_counters_that_lag_are_waited_for() -> None:
    server = FakeServer(faults=Faults(late_s=0.05))
    with session_of(server, 2) as ask:
        answers = ask(2)
    assert source(answers) == "chunks"


def test_more_requests_than_counters_keep_up_with() -> None:
    """Above 128 under way a server may count after it has answered: counters are read until they
    rest, also where those read first would do for another number of rounds."""
    server = FakeServer(faults=Faults(late_s=0.08))
    with session_of(server, 140) as ask:
        answers = ask(140)
    rounds = [w.rounds for w in server.written]
    assert len(rounds) == 140 and source(answers) == "chunks"
    served = [one.served for one in answers if one.served is not None and one.served.counted]
    assert served[0].counted is not None
    assert served[0].counted.num_drafts == sum(map(len, rounds))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("faults", "length", "remark"),
    [({"most": 5}, 5, "max_tokens_cut"), ({"beyond": 7}, 19, "max_tokens_exceeded")],
)
def test_a_text_of_another_length_than_asked_is_told(
    dialect: str, faults: dict[str, Any], length: int, remark: str
) -> None:
    server = FakeServer(dialect, faults=Faults(**faults))
    with session_of(server) as ask:
        answers = ask(2)
    assert remarks(answers) == {remark} and len(answers[0].token_ids) == length


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_token_of_another_model_is_an_error(dialect: str) -> None:
    """Ids that the recipe's target does not have: the server runs another model. The largest id of
    the vocabulary is one of its own."""
    server = FakeServer(dialect, faults=Faults(last=VOCABULARY - 1))
    with session_of(server) as ask:
        assert [a.error for a in ask(2)] == [None, None]
    for last in (VOCABULARY, 2**70):
        server = FakeServer(dialect, faults=Faults(last=last))
        with session_of(server) as ask:
            answers = ask(1)
        assert answers[0].error is not None
        told = "--target" if last == VOCABULARY else "not a whole number"
        assert told in answers[0].error
        assert server.asked == (1 if last == VOCABULARY else 3)


@pytest.mark.parametrize("kind", ["sum", "beyond_k", "few", "form", "proposed", "huge"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_details_that_contradict_themselves_are_dropped(dialect: str, kind: str) -> None:
    server = FakeServer(dialect, detailed=True, faults=Faults(bad_details=kind))
    with session_of(server, 2) as ask:
        answers = ask(4)
    assert remarks(answers) == {"spec_details_invalid"}
    assert source(answers) == ("chunks" if dialect == "vllm" else None)
    assert all(a.served is not None and a.served.acceptance_histogram is None for a in answers)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_changed_prompt_is_an_error(dialect: str) -> None:
    server = FakeServer(dialect, faults=Faults(bos=1))
    with session_of(server) as ask:
        (answer,) = ask(1)
    assert answer.error == "the server changed the prompt (sent 5 tokens, it read 6)"
    assert server.asked == 1
    server = FakeServer(dialect, faults=Faults(bos=1, bos_of=6))  # one of four
    with session_of(server) as ask:
        answers = ask(4)
    assert [a.error is None for a in answers] == [True, False, True, True]
    assert not remarks(answers), "its tokens are not another client's"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_prefix_cache_hits_are_told(dialect: str) -> None:
    server = FakeServer(dialect, faults=Faults(hits=True))
    with session_of(server) as ask:
        assert remarks(ask(2)) == {"prefix_cache_hits"}


def test_at_most_batch_size_requests_are_under_way_and_as_many_while_there_is_work() -> None:
    """Each text begins only when as many requests are under way as there can be."""
    server, begun, done = FakeServer(round_s=0.001), list[int](), list[bool]()
    with session_of(server, 3) as ask:
        stream = server._stream

        async def watched(*arguments: Any) -> Any:
            begun.append(server.running)
            deadline = time.monotonic() + 20
            while server.running < min(3, 9 - len(done)) and time.monotonic() < deadline:
                await asyncio.sleep(0.001)
            found = await stream(*arguments)
            done.append(time.monotonic() < deadline)
            return found

        server._stream = watched  # type: ignore[method-assign]
        ask(9)
    assert max(begun) == 3 and done == [True] * 9


def test_a_server_of_texts_alone() -> None:
    server = FakeServer("openai", k=3)
    with session_of(server) as ask:
        answers = ask(2)
    assert source(answers) is None and answers[0].token_ids == []
    served = answers[0].served
    assert served is not None and served.num_tokens == 12 and served.engine.kind == "openai"
    assert served.text == "".join(f" {t}" for t in server.written[0].tokens)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("ids", [["12"], [1.5], [-1], [None], [True], "ab"], ids=str)
def test_token_ids_that_are_none_are_an_error(dialect: str, ids: list[Any]) -> None:
    server = FakeServer(dialect, faults=Faults(ids=ids))
    with session_of(server) as ask:
        (answer,) = ask(1)
    assert "a token id or a usage that is not a whole number" in str(answer.error)
    assert answer.finish_reason == "error" and retries([answer]) == 2


@pytest.mark.parametrize("dialect", ["openai", "vllm"])
def test_tokens_that_nothing_counts_are_an_error(dialect: str) -> None:
    """A vLLM without `return_token_ids` sends texts alone too."""
    server = FakeServer(dialect, faults=Faults(usage=None, no_ids=True))
    with session_of(server) as ask:
        answers = ask(2)
    told = "the server sends neither token ids nor usage: cannot count tokens"
    assert [a.error for a in answers] == [told] * 2 and server.asked == 2


def test_ends_are_named() -> None:
    for dialect in DIALECTS:
        server = FakeServer(dialect, eos_every=5)
        with session_of(server) as ask:
            answers = ask(2)
        assert [a.finish_reason for a in answers] == ["eos", "length"]
        assert_true(server, answers)


def test_chunks_are_rounds_only_where_their_numbers_agree() -> None:
    assert chunks_tell([[2, 1], [4]], 3, 3, 4)
    assert chunks_tell([[2, 1], [2]], 3, 3, 4)  # the last round accepted beyond its text
    assert not chunks_tell([[2]], 3, 2, 1), "a round is missing"
    assert not chunks_tell([[2, 1]], 3, 2, 0), "they hold more than was accepted"
    assert not chunks_tell([[2, 1]], 3, 2, 5), "more was accepted than the last can hide"
    assert not chunks_tell([[5, 1]], 3, 2, 4), "two rounds in a chunk, and one in pieces"


def test_an_interruption_ends_the_requests_under_way(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would go on while connections close, and write a traceback."""
    gc.collect()  # what servers of earlier tests did not finish is logged when it is freed
    caplog.clear()
    close = aiohttp.ClientSession.close

    async def slowly(http: aiohttp.ClientSession) -> None:
        await close(http)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(aiohttp.ClientSession, "close", slowly)

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def work(http: aiohttp.ClientSession) -> None:
        async def again() -> None:
            while True:
                await asyncio.sleep(0)
                with suppress(aiohttp.ClientError):
                    await http.get("http://127.0.0.1:1")

        async with asyncio.TaskGroup() as group:
            group.create_task(again())
            asyncio.get_running_loop().call_later(0.05, interrupt)

    line = Line()
    with pytest.raises(KeyboardInterrupt):
        line.run(work)
    line.close()
    gc.collect()  # a task that failed unseen is logged when it is freed
    assert not [record.getMessage() for record in caplog.records]


def test_a_fault_in_a_request_is_told_as_itself() -> None:
    """asyncio puts the errors of tasks into a group, whose message does not say what failed."""

    async def one() -> None:
        raise ZeroDivisionError("a planted fault")

    async def work(_: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(one())
            group.create_task(one())

    line = Line()
    with pytest.raises(ZeroDivisionError, match=r"^a planted fault$"):
        line.run(work)
    line.close()
