"""Chooses which sequences run and which blocks they get.

Waiting prompts fill free slots in order. When blocks run out, the youngest running sequence gives
up its blocks and is recomputed later. Proposals are never shortened for lack of blocks: sampled
text depends on how many tokens are proposed, so it would then depend on the size of the cache.
"""

from collections import deque
from dataclasses import dataclass, field

from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.types import Sequence, cached_positions


@dataclass(slots=True, eq=False)
class Scheduler:
    """Admits sequences, reserves cache blocks for them, and preempts them when blocks run out.

    Deadlocks cannot occur: `add` refuses a sequence that could not run alone, and the oldest
    running sequence always advances.
    """

    allocator: BlockAllocator
    batch_size: int
    k: int
    draft_max_len: int
    ahead: int = 0  # see `Proposer.ahead`
    pending: deque[Sequence] = field(default_factory=deque)  # not arrived yet, in order of arrival
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)  # oldest first

    def add(self, seq: Sequence, *, is_here: bool = True) -> None:
        """Queue a sequence, or hold it until `arrive` if it has not arrived yet (`is_here` is
        False). Raises ValueError if the cache is too small for the sequence even when it runs
        alone."""
        need = self.allocator.blocks_for(self._most(seq))
        if need > self.allocator.num_usable:
            raise ValueError(
                f"needs {need} KV blocks of {self.allocator.block_size} tokens for "
                f"{seq.max_tokens} tokens; the cache has {self.allocator.num_usable}"
            )
        (self.waiting if is_here else self.pending).append(seq)

    def arrive(self, count: int) -> None:
        """Queue the first `count` pending sequences behind all waiting ones."""
        self.waiting.extend(self.pending.popleft() for _ in range(count))

    @property
    def is_done(self) -> bool:
        return self.is_idle and not self.pending

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do until a sequence arrives."""
        return not self.running and not self.waiting

    def proposal_len(self, seq: Sequence) -> int:
        """Return how many tokens the sequence's next round may propose. This does not depend on
        other sequences."""
        return min(self.k, seq.room(self.draft_max_len)) if self.k else 0

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free slots while there are blocks for them. Return them."""
        admitted: list[Sequence] = []
        while self.can_admit():
            seq = self.waiting.popleft()
            self.allocator.extend(seq.block_table, self._next_length(seq))
            self.running.append(seq)
            admitted.append(seq)
        return admitted

    def reserve(self) -> list[Sequence]:
        """Allocate the blocks that every running sequence needs for one round, and preempt the
        youngest sequences if there are too few. Return the sequences that take part, oldest
        first."""
        taking_part: list[Sequence] = []
        while len(taking_part) < len(self.running):
            seq = self.running[len(taking_part)]
            length = self._next_length(seq)
            while self.allocator.missing(seq.block_table, length) > self.allocator.num_free:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is seq:
                    return taking_part
            self.allocator.extend(seq.block_table, length)
            taking_part.append(seq)
        return taking_part

    def can_admit(self) -> bool:
        """Return whether `admit` would admit a sequence."""
        if not self.waiting or len(self.running) >= self.batch_size:
            return False
        # Keep one spare block per running sequence. Otherwise the new sequence would be preempted
        # as soon as the others grow.
        wanted = self.allocator.blocks_for(self._next_length(self.waiting[0])) + len(self.running)
        return wanted <= self.allocator.num_free

    def is_short(self, ahead: int) -> bool:
        """Return whether there are too few free blocks for `extend_ahead`."""
        missing = sum(
            self.allocator.missing(s.block_table, self._length_ahead(s, ahead))
            for s in self.running
        )
        return missing > self.allocator.num_free

    def extend_ahead(self, ahead: int) -> list[tuple[Sequence, list[int]]]:
        """Allocate blocks for a round whose sequences may be up to `ahead` tokens longer than the
        host knows. Return the sequences that got blocks, with their new blocks. `is_short` must be
        False."""
        added = []
        for seq in self.running:
            before = len(seq.block_table)
            self.allocator.extend(seq.block_table, self._length_ahead(seq, ahead))
            if len(seq.block_table) > before:
                added.append((seq, seq.block_table[before:]))
        return added

    def trim(self, seq: Sequence) -> None:
        """Release the blocks that held only rejected proposals."""
        self.allocator.shrink(seq.block_table, len(seq.tokens))

    def finish(self, seq: Sequence) -> None:
        self.allocator.shrink(seq.block_table, 0)
        self.running.remove(seq)

    def release_all(self) -> None:
        """Free all blocks and empty all queues, at the end of a run or after an error."""
        for seq in self.running:
            self.allocator.shrink(seq.block_table, 0)
        for queue in (self.running, self.waiting, self.pending):
            queue.clear()

    def _next_length(self, seq: Sequence) -> int:
        proposed = self.proposal_len(seq)
        length = len(seq.tokens) + proposed
        if proposed and self.ahead:
            length = max(length, min(len(seq.tokens) + self.ahead, self.draft_max_len))
        return length

    def _most(self, seq: Sequence) -> int:
        prompt = seq.num_prompt_tokens
        return cached_positions(prompt, seq.max_tokens, self.ahead, self.draft_max_len)

    def _length_ahead(self, seq: Sequence, ahead: int) -> int:
        """Return the maximum number of tokens for which the sequence may need cache blocks in its
        next round. By then, it may have grown by up to `ahead` tokens that the host has not
        read."""
        n = len(seq.tokens)
        return max(n, min(n + ahead + max(self.k, self.ahead), self._most(seq)))

    def _preempt(self, seq: Sequence) -> None:
        self.allocator.shrink(seq.block_table, 0)
        seq.target_kv = seq.draft_kv = 0
        seq.num_preemptions += 1
        self.running.remove(seq)
        self.waiting.appendleft(seq)
