"""Servers as a backend: what the recipe needs on this side, which is a tokenizer alone.

Imports of tokenizers wait inside functions.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec_cli import __version__
from specdec_cli.backends.base import Prepared, Session
from specdec_cli.backends.server.client import Limits
from specdec_cli.backends.server.detect import look_at
from specdec_cli.backends.server.dialects import ServerFacts
from specdec_cli.backends.server.session import Line, ServerSession
from specdec_cli.core.detokenize import Tokenizer
from specdec_cli.core.types import Permissions, SamplingParams
from specdec_cli.errors import UsageError
from specdec_cli.recipe import Recipe
from specdec_cli.recipe.choices.registry import weights_from, without_draft

_UNLIMITED = 1 << 31


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The device of a run that computes nothing itself."""

    type: str = "elsewhere"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A recipe for servers. k: the largest of theirs. dtype_name: not told by servers that are up,
    so that no text must be identical."""

    recipe: Recipe
    k: int
    proposer: str | None
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    device_name: str
    generation_config: dict[str, Any]
    dtype_name: str = "unknown"
    device: Elsewhere = Elsewhere()
    eos_ids: frozenset[int] = frozenset()
    draft_max_len: int | None = None
    num_ranks: int = 1
    has_experts: bool = False
    reads_hidden: bool = False
    remark: str | None = None
    readings: Sequence[Any] = ()

    @property
    def params(self) -> SamplingParams:
        asked = self.recipe.sampling.model_dump(exclude={"source"})
        return SamplingParams(**asked, seed=self.recipe.run.seed)

    @property
    def random_roles(self) -> set[str]:
        return set()

    @property
    def stages(self) -> list[str]:
        return []

    def fingerprint(self, role: str) -> str | None:
        return None


class ServerBackend:
    """Servers that are up, by k. Use it as a context manager."""

    is_native = False

    def __init__(self) -> None:
        self._line = Line()
        self.servers: dict[int, ServerFacts] = {}

    def __enter__(self) -> "ServerBackend":
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def look(self, url: str, recipe: Recipe) -> ServerFacts:
        """What answers at `url`; see `look_at`."""
        engine = recipe.engine
        return self._line.run(
            lambda http: look_at(http, url, engine.served_model, engine.start_timeout_s)
        )

    def prepare(
        self, recipe: Recipe, permissions: Permissions, largest: tuple[int, int] | None = None
    ) -> ServerPlan:
        from specdec_cli.models.config_file import config_file
        from specdec_cli.models.generation_config import generation_config, with_sampling
        from specdec_cli.models.resolve import model_place
        from specdec_cli.models.tokenizer import load_tokenizer

        recipe, target = with_sampling(recipe), recipe.target
        for facts in self.servers.values():
            _refuse_unsent(facts, recipe)
        place = model_place(target.model, target.revision, target.file, weights=False)
        config: Mapping[str, Any] = config_file(target.model, place)
        inner = config.get("text_config")
        inner = inner if isinstance(inner, Mapping) else config
        vocabulary = config.get("vocab_size") or inner.get("vocab_size") or _UNLIMITED
        own = inner.get("max_position_embeddings") or _UNLIMITED
        told = [f.max_model_len for f in self.servers.values() if f.max_model_len is not None]
        kinds = {facts.kind for facts in self.servers.values()}
        return ServerPlan(
            recipe=recipe,
            k=max(self.servers),
            proposer=self._proposer(recipe),
            tokenizer=load_tokenizer(
                *(place, target.model, vocabulary, target.load_format == "dummy"),
                permissions.trust_remote_code,
            ),
            vocab_size=vocabulary,
            max_model_len=min(recipe.cache.max_model_len or _UNLIMITED, *(told or [own])),
            generation_config=generation_config(place),
            device_name=f"server ({', '.join(sorted(kinds))})",
        )

    def _proposer(self, recipe: Recipe) -> str | None:
        """The recipe's draft or method, else what a server says."""
        method = recipe.speculation.method
        if weights_from(method) == "draft" and recipe.draft is not None:
            return recipe.draft.model
        if without_draft(method):
            return method
        told = (facts.method for k, facts in self.servers.items() if k)
        return next((name for name in told if name), "server" if max(self.servers) else None)

    def open_session(
        self,
        plan: Prepared,
        longest_prompt: int,
        on_stage: Callable[[str], None],
        weights: object = None,
    ) -> ServerSession:
        recipe = plan.recipe
        return ServerSession(
            servers=self.servers,
            batch_size=recipe.run.batch_size,
            max_model_len=plan.max_model_len,
            limits=Limits(recipe.engine.request_timeout_s, recipe.engine.retries),
            may_skip=recipe.speculation.method == "ngram",
            line=self._line,
        )

    def open_beside(
        self,
        plan: Prepared,
        longest_prompt: int,
        session: Session,
        on_stage: Callable[[str], None],
    ) -> Session | None:
        raise UsageError("--draft: with --server there is one draft, the server's")

    def environment(self, plan: Prepared) -> dict[str, Any]:
        return {
            "specdec": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": plan.device_name,
            "dtype": plan.dtype_name,
            "servers": [asdict(facts) for _, facts in sorted(self.servers.items())],
        }

    def peak_memory(self, plan: Prepared) -> int:
        return 0

    def free_memory(self, plan: Prepared) -> None:
        """Nothing is held."""


def _refuse_unsent(facts: ServerFacts, recipe: Recipe) -> None:
    """Raise `UsageError` for sampling that a server's requests cannot ask for."""
    unsent = ["suppress_tokens"]
    if facts.kind == "openai":
        unsent += ["top_k", "repetition_penalty", "min_new_tokens", "ignore_eos"]
    fields = type(recipe.sampling).model_fields
    for name in unsent:
        if getattr(recipe.sampling, name) != fields[name].default:
            raise UsageError(
                f"sampling.{name}: the server at {facts.url} ({facts.kind}) cannot be asked for it",
                f"leave sampling.{name} out",
            )
