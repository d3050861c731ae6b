"""The interface between a measurement and an engine: requests go in, answers come out.

Requests carry the times at which they are due (`Request.arrives_at`). A measurement uses only the
answers, so it does not depend on the engine. This module does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from specdec_cli.core.detokenize import Tokenizer
from specdec_cli.core.figures import Counted, EngineFacts, Metrics
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.types import Arrivals, FinishReason, Permissions, Request, SamplingParams
from specdec_cli.errors import Notice
from specdec_cli.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Served:
    """The fields of an answer that only servers provide. `experiment.folders.records.Sample`
    documents them."""

    engine: EngineFacts
    num_retries: int = 0
    e2el_ms: float | None = None
    send_lag_ms: float | None = None
    acceptance_histogram: list[int] | None = None
    counted: Counted | None = None
    num_tokens: int | None = None
    text: str | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer to one request.

    max_output_tokens: the number of tokens at which the answer would have been cut off.
    proposed_per_round, accepted_per_round: the number of tokens that each round proposed and
        accepted, in order. Rounds without proposals are left out. None if the engine does not
        report this.
    arrived_at, admitted_at, first_token_at, finished_at: times in seconds on one clock.
    prefill_seconds, decode_seconds, round_share, stage_ms: this request's share of the engine's
        time and rounds. They are 0 or empty if the engine does not measure them.
    served: the fields that only servers provide; None for our own engine.

    The other fields are explained in `core.types.Sequence`, under the same names.
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    max_output_tokens: int
    error: str | None = None
    proposed_per_round: list[int] | None = None
    accepted_per_round: list[int] | None = None
    rounds_without_proposal: int = 0
    num_tokens_from_prefill: int = 0
    num_preemptions: int = 0
    arrived_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    round_share: float = 0.0
    stage_ms: dict[str, float] = field(default_factory=dict)
    ttft_ms: float | None = None
    ttft_parts_ms: dict[str, float] | None = None
    tpot_ms: float | None = None
    distinct_experts: float | None = None
    served: Served | None = None

    @property
    def seconds(self) -> float:
        """This request's share of the time for prefill and decoding, in seconds."""
        return self.prefill_seconds + self.decode_seconds


class Written(Protocol):
    """New tokens of one request. The first `num_accepted` of them were proposals."""

    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_accepted(self) -> int: ...


# Called once per round, with the new tokens and with the answers that they complete.
OnRound = Callable[[Sequence[Written], list[Finished]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A recipe that passed all checks, with the facts that a measurement needs. Nothing is loaded
    yet.

    proposer: the name of the draft, or of the method if it needs no draft; None if the run
        proposes no tokens.
    draft_max_len: the draft's context length in tokens; None without a draft.
    ahead: the number of positions past a text's end that the draft's passes write; see
        `methods.base.Proposer.ahead`.
    device: a torch device, or another object with a `type`.
    device_name: the name of the GPU, or else the device's type.
    random_roles: the roles ("target", "draft") whose models have random weights.
    remark: a note on the acceptance rule for readers of the results; None for no note.
    readings: other ways to interpret the draft's checkpoint, if tools disagree on its format.
    reads_hidden: whether the draft takes the target's hidden states as input.
    generation_config: the content of the target's generation_config.json.
    stages: the names of the loading stages, in order.
    fingerprint: a function that takes a role and returns a hash of its model, or None if the role
        has no model. Different models have different hashes, even if they have the same name.
    plugins: the SHA-256 of each loaded plugin, by its file's name.
    own: the backend's own data, which nothing else reads.
    few_threads: a notice that fewer CPU threads are used than there are processors; None if there
        is nothing to report.
    """

    recipe: Recipe
    k: int
    proposer: str | None
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    device: Any
    device_name: str
    dtype_name: str
    generation_config: dict[str, Any]
    eos_ids: frozenset[int] = frozenset()
    draft_max_len: int | None = None
    ahead: int = 0
    num_ranks: int = 1
    random_roles: frozenset[str] = frozenset()
    has_experts: bool = False
    reads_hidden: bool = False
    remark: str | None = None
    readings: Sequence[Any] = ()
    stages: Sequence[str] = ()
    fingerprint: Callable[[str], str | None] = lambda role: None
    plugins: Mapping[str, str] = field(default_factory=dict)
    own: Any = None
    few_threads: Notice | None = None

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters: the recipe's sampling section without `source`, and the run's
        seed."""
        asked = self.recipe.sampling.model_dump(exclude={"source"})
        return SamplingParams(**asked, seed=self.recipe.run.seed)


class Session(Protocol):
    """Loaded models that answer requests, up to `batch_size` at a time. Only one session runs at a
    time.

    reach: the sequence length, in tokens, at which the proposer stops proposing.
    weights: the target's weights, so that the next session can use them without loading them again.
    """

    @property
    def batch_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def reach(self) -> int: ...
    @property
    def weights(self) -> object: ...

    def run(
        self, requests: Sequence[Request], k: int, params: SamplingParams, on_round: OnRound
    ) -> Metrics | None:
        """Answer every request, with at most `k` proposals per round.

        on_round: called once per round, with the new tokens and the answers that they complete.

        Returns the metrics of the run; None if the caller can compute them from the answers, as it
        can for servers.
        """
        ...

    def arrive(
        self,
        arrivals: Arrivals,
        k: int,
        params: SamplingParams,
        on_sign: Callable[[], None],
    ) -> list[Finished]:
        """Answer requests as they arrive, until `arrivals.is_over`.

        Calls `arrivals.answered` with the index of each request that ends. The times in the answers
        are from `time.perf_counter`, and `arrived_at` is the time at which the request was due.

        on_sign: called from time to time to show that the engine is still running, even if no
            request is due.
        """
        ...

    def resized(self, batch_size: int) -> "Session":
        """Return a session with the same models and a different number of concurrent requests. 0
        means no limit."""
        ...

    def forget_rounds(self) -> None:
        """Free resources that only rounds at this batch size use, such as captured CUDA graphs."""

    def logits_after(
        self, tokens: list[int], width: int, start: int, params: SamplingParams
    ) -> np.ndarray:
        """Compute the target's logits for the token after `tokens`: fp32 [V]. Every rank must call
        this, but only rank 0's result is valid.

        width: the number of tokens in the last forward pass; the tokens before them are prefilled.
            The rounding of the logits depends on it.
        start: the number of prompt tokens.
        params: the sampling parameters for processing the logits. Tokens that they forbid get -inf.
        """
        ...

    def forecast(
        self, request: Request, output: list[int], k: int, params: SamplingParams
    ) -> Forecast | None:
        """Predict which proposals would be accepted if the engine answered `request` with `output`,
        an existing text, with at most `k` proposals per round. Returns None if the method or the
        acceptance rule cannot predict this."""
        ...


class Backend(Protocol):
    """An engine. `prepare` makes the plan that the other functions take.

    is_native: whether this is our own engine. Only our own engine measures the stages of rounds,
        forecasts acceptance and returns logits.
    holds_caches: whether the recipe's `cache` section applies. It does not apply to servers that
        were already running.
    """

    @property
    def is_native(self) -> bool: ...

    @property
    def holds_caches(self) -> bool: ...

    def prepare(
        self, recipe: Recipe, permissions: Permissions, largest: tuple[int, int] | None = None
    ) -> Prepared:
        """Check a recipe and plan its run.

        largest: the largest k and the largest batch size that the run will use; None to use those
            of the recipe.
        """
        ...

    def open_session(
        self,
        plan: Prepared,
        longest_prompt: int,
        on_stage: Callable[[str], None],
        weights: object = None,
    ) -> Session:
        """Load the models.

        longest_prompt: the length of the longest prompt, in tokens.
        on_stage: called with the name of each loading stage as it begins.
        weights: the target's weights, taken over from a session that is no longer used; None to
            load them.
        """
        ...

    def open_beside(
        self,
        plan: Prepared,
        longest_prompt: int,
        session: Session,
        on_stage: Callable[[str], None],
    ) -> Session | None:
        """Open a session with a different draft that shares the target of `session`. `session`
        stays usable. Returns None if there is not enough memory."""
        ...

    def environment(self, plan: Prepared) -> dict[str, Any]:
        """Return the versions, the device and other facts of the environment to save with the
        results."""
        ...

    def peak_memory(self, plan: Prepared) -> int:
        """Return the peak memory so far, in bytes."""
        ...

    def free_memory(self, plan: Prepared) -> None:
        """Release memory that is no longer used."""
