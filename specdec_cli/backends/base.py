"""The interface between a measurement and an engine: requests go in, answers come out.

Requests carry the times at which they are due (`Request.arrives_at`). A measurement uses only the
answers, so it does not depend on the engine. Imports no torch.
"""

from collections.abc import Callable, Sequence
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
    """Figures that only answers from servers have; see `folders.records.Sample`."""

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

    max_output_tokens: the number of tokens after which the answer had to end. *_per_round: the
    numbers of proposed and of accepted tokens in each round with proposals, in order; None if the
    engine does not report them. The fields after these are explained in `core.types.Sequence`.
    arrived_at to finished_at: seconds on one clock. Shares and stage times are 0 or empty if an
    engine has none.
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
        """The request's shares of the time of prefill and of rounds."""
        return self.prefill_seconds + self.decode_seconds


class Written(Protocol):
    """Tokens of one request as they arrive; the first `num_accepted` were proposals."""

    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_accepted(self) -> int: ...


# Called once per round with the new tokens, and with the answers that they complete.
OnRound = Callable[[Sequence[Written], list[Finished]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked recipe, before anything is loaded.

    proposer: the name of the arm. draft_max_len: the draft's context length; None without a draft.
    device: an object with a `type`. device_name: the device's type, or a GPU's name. random_roles:
    the models with random weights. remark, readings: notes for readers of the results, about the
    acceptance rule and the draft. reads_hidden: whether the draft takes the target's hidden states.
    generation_config: what `generation_config` reads of the target. stages: the stages
    of opening a session. fingerprint: gives, for a role, a hash that tells models of one name
    apart; None for a role without a model. own: data of the backend itself. few_threads: the notice
    that the backend runs on fewer threads than it could.
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
    num_ranks: int = 1
    random_roles: frozenset[str] = frozenset()
    has_experts: bool = False
    reads_hidden: bool = False
    remark: str | None = None
    readings: Sequence[Any] = ()
    stages: Sequence[str] = ()
    fingerprint: Callable[[str], str | None] = lambda role: None
    own: Any = None
    few_threads: Notice | None = None

    @property
    def params(self) -> SamplingParams:
        """The recipe's sampling section as parameters; the keys have the same names."""
        asked = self.recipe.sampling.model_dump(exclude={"source"})
        return SamplingParams(**asked, seed=self.recipe.run.seed)


class Session(Protocol):
    """Loaded models that answer requests, `batch_size` at a time. Sessions run one at a time.

    weights: the target's weights, which the next session may take over. reach: the text length
    beyond which nothing is proposed.
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

        Returns None if metrics follow from the answers alone, as they do for servers.
        """
        ...

    def arrive(
        self,
        arrivals: Arrivals,
        k: int,
        params: SamplingParams,
        on_sign: Callable[[], None],
    ) -> list[Finished]:
        """Answer requests as they arrive, until `arrivals` are over. `arrivals` gets the index of
        each answer as it ends. on_sign: called now and then, also while nothing is due.

        Times of answers are on the clock `time.perf_counter`, and `arrived_at` is the due time.
        """
        ...

    def resized(self, batch_size: int) -> "Session":
        """The same models with a different number of concurrent requests; 0 means no limit."""
        ...

    def forget_rounds(self) -> None:
        """Free the data that belong to this batch size alone."""

    def logits_after(
        self, tokens: list[int], width: int, start: int, params: SamplingParams
    ) -> np.ndarray:
        """The target's logits [V], fp32, after `tokens`, as passes over `width` tokens give them,
        processed as `params` asks: -inf for ids that cannot follow. start: the number of tokens of
        the prompt.

        Every rank calls this; only rank 0's logits are valid.
        """
        ...

    def forecast(
        self, request: Request, output: list[int], k: int, params: SamplingParams
    ) -> Forecast | None:
        """The acceptance of proposals along `output`; None if the method has no forecast."""
        ...


class Backend(Protocol):
    """An engine. `prepare` makes the plan that the other functions take.

    is_native: whether the engine is our own, which stamps rounds, forecasts them and has logits.
    """

    @property
    def is_native(self) -> bool: ...

    def prepare(
        self, recipe: Recipe, permissions: Permissions, largest: tuple[int, int] | None = None
    ) -> Prepared:
        """Check a recipe. largest: the largest k and batch size; None for the recipe's own."""
        ...

    def open_session(
        self,
        plan: Prepared,
        longest_prompt: int,
        on_stage: Callable[[str], None],
        weights: object = None,
    ) -> Session:
        """Load the models. weights: the weights of a session that is no longer used."""
        ...

    def open_beside(
        self,
        plan: Prepared,
        longest_prompt: int,
        session: Session,
        on_stage: Callable[[str], None],
    ) -> Session | None:
        """Open a session with a different draft on the target of `session`, which stays usable;
        None if memory does not suffice."""
        ...

    def environment(self, plan: Prepared) -> dict[str, Any]:
        """The record of the environment."""
        ...

    def peak_memory(self, plan: Prepared) -> int:
        """The peak number of bytes held so far."""
        ...

    def free_memory(self, plan: Prepared) -> None:
        """Return memory that is no longer used."""
