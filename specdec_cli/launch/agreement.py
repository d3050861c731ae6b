"""Lets all ranks agree on the outcome of a step, so that a run can survive a failure that all of
them share."""

from datetime import timedelta
from typing import Any

from specdec_cli.launch.quiet import meeting_quietly
from specdec_cli.launch.rank import PeersMissing

_PATIENCE_S = 10.0  # how long a rank whose step failed waits for the others to fail as well


class Agreement:
    """Tells each rank how a step ended on the other ranks. All ranks must create it at the same
    point in the program. It has its own process group, so that its messages cannot be mixed up with
    the collectives of a model.

    patience_s: the seconds for which a rank whose step succeeded waits for the others.
    """

    def __init__(self, world_size: int, patience_s: float) -> None:
        self._size = world_size
        self._patience = timedelta(seconds=patience_s)
        self._group: Any = None
        if world_size > 1:
            import torch.distributed as dist

            with meeting_quietly():
                self._group = dist.new_group(backend="gloo", timeout=self._patience)

    def settle(self, problem: Exception | None, value: int) -> tuple[bool, list[int]]:
        """Exchange the outcome of a step with the other ranks. Returns whether the step failed,
        which must be the same on every rank, and the `value` of each rank.

        problem: the error of the step on this rank; None if it succeeded.

        If only some ranks failed, or if ranks have started different numbers of collectives, the
        run cannot continue. Failed ranks then raise `problem`, and the others raise `PeersMissing`,
        since another rank is the cause. Raises `RuntimeError` if the step succeeded here and the
        other ranks do not answer in time.
        """
        if self._group is None:
            return problem is not None, [value]
        try:
            rows = self._gather([int(problem is not None), value], problem is not None)
        except RuntimeError:
            if problem is None:
                raise
            raise problem from None  # other ranks wait for this one inside a collective
        failed = [bool(row[0]) for row in rows]
        if any(failed) and not (all(failed) and self._are_together()):
            raise problem or PeersMissing("another rank failed")
        return all(failed), [row[1] for row in rows]

    def _gather(self, own: list[int], is_short: bool = False) -> list[list[int]]:
        import torch
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        row = torch.tensor(own)
        rows = [torch.empty_like(row) for _ in range(self._size)]
        patience = timedelta(seconds=_PATIENCE_S) if is_short else self._patience
        c10d._set_pg_timeout(patience, self._group)
        dist.all_gather(rows, row, group=self._group)
        return [found.tolist() for found in rows]

    def _are_together(self) -> bool:
        """Return True if all ranks have started the same number of collectives in every group."""
        rows = self._gather(list(self._places()))
        inner = {row[1] for row in rows} - {-1}
        return len({row[0] for row in rows}) == 1 and len(inner) <= 1

    def _places(self) -> tuple[int, int]:
        """Count the collectives that this rank has started in groups of all ranks, and in its
        smaller groups. The second count is -1 if it is in no smaller group."""
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        groups = [g for g in c10d._world.pg_map if not c10d._rank_not_in_group(g)]
        # torch's type stubs do not declare `_get_sequence_number_for_group`.
        begun = [(g.size(), g._get_sequence_number_for_group()) for g in groups]  # type: ignore[attr-defined]
        whole = sum(count for size, count in begun if size == dist.get_world_size())
        part = [count for size, count in begun if size < dist.get_world_size()]
        return whole, sum(part) if part else -1
