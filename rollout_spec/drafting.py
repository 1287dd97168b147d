"""Where the engine meets the drafter: proposals for the sequences that decode, within the step's budget."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from .batch import StepEntry
from .draft.budget import HostTimes, LookAheadTimes, NodeBudget, StepOption, StepTimes, share_nodes
from .draft.config import DraftConfig
from .draft.drafter import Drafter
from .draft.heads import HeadDrafter
from .draft.hybrid import HybridDrafter
from .draft.trie import TrieDrafter
from .draft.trust import Patience, Trust
from .draft.watch import AcceptanceWatch
from .errors import DraftError
from .scheduler import Scheduler
from .shapes import smallest_fitting
from .step_inputs import StepShape
from .tree import DraftTree

_log = logging.getLogger(__name__)

_SHARE_OF_STEP_FOR_PROBES = 0.002
_LONGEST_WAIT = 63
_SHARE_OF_NEWS = 0.25  # of the requests whose text has begun to repeat, to ask for all
_STEPS_BETWEEN_NEWS = 8  # while no drafts pay
_MOST_STEPS_UNLEARNT = 16


@dataclass(frozen=True)
class StepPlan:
    """The shape of a step, and how it came to that."""

    shape: StepShape
    cached: int
    """Tokens in the caches of its sequences, the step's own not counted."""
    only_decodes: bool
    """Every sequence emits tokens and no prompt is computed, so that it can be compared with a plain step."""
    asked: bool = False
    """The drafter was asked for proposals."""
    no_drafts_because: str | None = None
    """Why it verifies no drafts; None if it does."""
    predicted_s: float | None = None
    """What the device was expected to take; None before that size was measured."""
    plain_s: float | None = None
    """What a step without drafts would take, the host's part included; None while it isn't known."""
    looks_ahead: bool = False
    """The policy's heads draft behind it, for the next step."""


class DraftPlanner:
    """Adds draft trees to a step and chooses the step's shape."""

    def __init__(
        self,
        config: DraftConfig,
        drafter: Drafter | None,
        shapes: Sequence[StepShape],
        vocab_size: int,
    ) -> None:
        self.config = config
        self.drafter = drafter
        self.shapes = shapes
        self.vocab_size = vocab_size
        self.times = StepTimes()
        self.host_times = HostTimes()
        self._trust: dict[Hashable, Trust] = {}
        self._patience = Patience()  # with all requests together
        self._watch = AcceptanceWatch()
        self.trie, self.heads = parts_of(drafter)
        self._heads_patience = Patience()
        self._look_ahead_s = LookAheadTimes()
        self._ask_s = deque[float](maxlen=15)  # host seconds of one request's proposal
        self._unlearnt: dict[Hashable, list[NDArray[np.int32]]] = {}
        self._steps_unlearnt = 0

    # The drafter's knowledge

    def start(self, key: Hashable, prompt: NDArray[np.int32], group_id: Hashable) -> None:
        """A sequence runs, for the first time or again."""
        assert self.drafter is not None
        self.catch_up()
        self.drafter.start(key, prompt, group_id=group_id)
        self._trust[key] = Trust()

    def new_version(self, version: int) -> None:
        """The policy's weights were replaced."""
        assert self.drafter is not None
        self.catch_up()
        self._watch.new_version(version)
        self.drafter.new_version(version)

    def learn(self, keys: Sequence[Hashable], tokens: Sequence[NDArray[np.int32]]) -> None:
        """The next tokens of some sequences are known. The trie gets them when it is asked next, see `catch_up`."""
        if self.heads is not None:
            for key, new in zip(keys, tokens, strict=True):
                self.heads.extend(key, new)
        if self.trie is not None:
            for key, new in zip(keys, tokens, strict=True):
                self._unlearnt.setdefault(key, []).append(new)
            self._steps_unlearnt += 1
            if self._steps_unlearnt >= _MOST_STEPS_UNLEARNT:
                self.catch_up()
        elif self.drafter is not None and self.heads is None:
            for key, new in zip(keys, tokens, strict=True):
                self.drafter.extend(key, new)

    def offer(
        self, entries: Sequence[StepEntry], tokens: NDArray[np.int32], probs: NDArray[np.float32]
    ) -> None:
        """What the policy's heads named behind a step's entries: [S, depth, choices], as deep as they were asked."""
        assert self.heads is not None
        for number, entry in enumerate(entries):
            depth = entry.draft_depth
            if entry.sequence.finish_reason is None:
                self.heads.offer(entry.sequence.key, tokens[number, :depth], probs[number, :depth])

    def catch_up(self) -> None:
        """Lets the trie learn what it hasn't yet. Several steps at once cost little more than one of them."""
        if not self._unlearnt:
            return
        assert self.trie is not None
        unlearnt, self._unlearnt, self._steps_unlearnt = self._unlearnt, {}, 0
        tokens = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in unlearnt.values()]
        self.trie.extend_all(list(unlearnt), tokens)

    def finish(self, key: Hashable) -> None:
        """A sequence ended or was aborted."""
        assert self.drafter is not None
        self._trust.pop(key, None)
        try:
            self.catch_up()
            self.drafter.finish(key)
        except Exception:  # the tokens are there; a drafter's fault must not lose them
            _log.exception("the drafter failed to finish %r; its private context may stay", key)

    def verified(self, entries: Sequence[StepEntry], accepted: Sequence[int]) -> None:
        """What became of a step's drafts: how many tokens of each entry's tree were accepted."""
        drafted, expected, hits = 0, 0.0, 0
        for entry, count in zip(entries, accepted, strict=True):
            if entry.tree is None:
                continue
            hoped = float(entry.tree.probs.sum())
            trust = self._trust.get(entry.sequence.key)
            if trust is not None:
                trust.verified(hoped, count)
            drafted, expected, hits = drafted + len(entry.tree), expected + hoped, hits + count
        warning = self._watch.note(drafted, expected, hits) if drafted else None
        if warning is not None:
            _log.warning("%s (engine.stats() has acceptance by depth)", warning)

    # The plan

    def plan(self, entries: Sequence[StepEntry], scheduler: Scheduler) -> StepPlan:
        """Sets the entries' trees and how far the heads look ahead; returns the plan for the step that takes all."""
        plan = self._plan(entries, scheduler)
        if self.heads is None or not self._heads_are_due(plan):
            return plan
        depth = self.config.look_ahead
        for entry in entries:
            if entry.samples and entry.sequence.room > 1:
                fitting = scheduler.pages_for_draft(
                    entry.sequence, entry.num_nodes + depth - 1, count=entry.count
                )
                entry.draft_depth = min(depth, max(0, fitting - entry.num_nodes) + 1)
        return dataclasses.replace(plan, looks_ahead=any(entry.draft_depth for entry in entries))

    def _heads_are_due(self, plan: StepPlan) -> bool:
        """Whether it is worth the heads' time to draft behind this step."""
        if not self.config.gate:
            return self.config.max_nodes > 0
        if plan.no_drafts_because == "plain step not measured lately":
            return False
        return self._heads_patience.is_over()

    def _plan(self, entries: Sequence[StepEntry], scheduler: Scheduler) -> StepPlan:
        tokens = sum(entry.num_tokens for entry in entries)
        rows = sum(entry.num_rows for entry in entries)
        cached = sum(entry.sequence.cached for entry in entries)
        decoding = [e for e in entries if e.count == 1 and e.samples]
        only_decodes = len(decoding) == len(entries)
        plain = self._fitting(tokens, len(entries), rows)
        plain_s = None
        if only_decodes and self.times.knows(plain):
            plain_s = self.times.expected(plain, cached) + self.host_times.expected(drafted=False)

        def without_drafts(reason: str, *, asked: bool = False) -> StepPlan:
            predicted = self.times.expected(plain, cached) if self.times.knows(plain) else None
            return StepPlan(plain, cached, only_decodes, asked, reason, predicted, plain_s)

        if self.drafter is None or self.config.max_nodes == 0:
            return without_drafts("drafting is off")
        if not decoding:
            return without_drafts("only prompts")
        drafting = [e for e in decoding if e.sequence.room > 1]
        if not drafting:
            return without_drafts("last tokens")
        if self.config.gate:
            if not self.times.knows(plain):
                return without_drafts("plain step not measured lately")
            drafting = self._due(drafting)
            if not drafting:
                return without_drafts("did not pay lately")
        options = self._options(plain, tokens, len(entries), rows, cached)
        room = options[-1].capacity
        if room == 0:
            return without_drafts("no room in the step")
        if self.config.gate:
            self._choose(drafting, options, len(decoding))
        else:
            self._propose(drafting, min(self.config.max_nodes, room // len(drafting)))
        nodes = 0
        for entry in drafting:
            if entry.tree is None:
                continue
            fitting = scheduler.pages_for_draft(entry.sequence, len(entry.tree))
            entry.tree = first_nodes(entry.tree, fitting) if fitting else None
            nodes += fitting
        if nodes == 0:
            return without_drafts("nothing likely enough", asked=True)
        shape = self._fitting(tokens + nodes, len(entries), rows + nodes)
        predicted = self.times.expected(shape, cached) if self.times.knows(shape) else None
        return StepPlan(shape, cached, only_decodes, True, None, predicted, plain_s)

    def _due(self, drafting: Sequence[StepEntry]) -> list[StepEntry]:
        """Those for which the drafter is worth asking.

        While no request's drafts pay they are asked together, as a larger step may pay for all and not for one.
        """
        trust = [self._trust[entry.sequence.key] for entry in drafting]
        if self.heads is not None and any(self.heads.has_offer(entry.sequence.key) for entry in drafting):
            return list(drafting)  # their time is spent already
        if self.trie is None and self.heads is not None:
            return []
        familiar, steps = [0] * len(drafting), 1
        if self.trie is not None:
            if (
                self._patience.fruitless
                and self._patience.wait
                and self._steps_unlearnt < _STEPS_BETWEEN_NEWS
            ):
                self._patience.wait -= 1
                return []
            steps = max(1, self._steps_unlearnt)
            self.catch_up()
            familiar = self.trie.familiar_tokens([entry.sequence.key for entry in drafting])
        news = [one.newly_familiar(tokens) for one, tokens in zip(trust, familiar, strict=True)]
        if self._patience.fruitless:
            over = self._patience.is_over() or sum(news) >= _SHARE_OF_NEWS * len(news)
            due = [over] * len(drafting)
        else:
            due = [one.patience.is_over() or new for one, new in zip(trust, news, strict=True)]
        for one, tokens, is_due in zip(trust, familiar, due, strict=True):
            if is_due:
                one.familiar = tokens
            else:
                one.idle(steps)
        return [entry for entry, is_due in zip(drafting, due, strict=True) if is_due]

    def _options(
        self, plain: StepShape, tokens: int, sequences: int, rows: int, cached: int
    ) -> list[StepOption]:
        """The step without drafts, then the sizes it could have, each with more room than the one before."""
        host, host_drafting = (self.host_times.expected(drafted) for drafted in (False, True))
        options = [StepOption(plain, 0, self.times.expected(plain, cached) + host)]
        for shape in self.shapes:
            capacity = min(shape.tokens - tokens, shape.rows - rows)
            if capacity > options[-1].capacity and shape.sequences >= sequences:
                options.append(
                    StepOption(shape, capacity, self.times.expected(shape, cached) + host_drafting)
                )
        return options

    def _choose(self, drafting: Sequence[StepEntry], options: Sequence[StepOption], decoding: int) -> None:
        """Proposes, and keeps of all trees the nodes that are worth their time."""
        started = time.perf_counter()
        trees = self._propose(drafting, min(self.config.max_nodes, options[-1].capacity))
        self._ask_s.append((time.perf_counter() - started) / len(drafting))
        trust = [self._trust[entry.sequence.key] for entry in drafting]
        probs = [
            tree.probs if one.factor == 1.0 else tree.probs * np.float32(one.factor)
            for tree, one in zip(trees, trust, strict=True)
        ]
        budget = share_nodes(probs, options, decoding)
        if self.heads is not None:
            self._weigh_heads(budget, options[0], decoding, sum(float(tree.probs.sum()) for tree in trees))
        longest_wait = self._longest_wait(len(drafting), options[0].seconds)
        if any(budget.nodes):
            self._patience.rewarded()
        else:
            self._patience.tried(longest_wait)
        for entry, tree, one, count in zip(drafting, trees, trust, budget.nodes, strict=True):
            entry.tree = tree.likeliest(count) if count else None
            if count:
                one.patience.rewarded()
            else:
                one.idle()
                one.patience.tried(longest_wait)

    def _weigh_heads(self, budget: NodeBudget, plain: StepOption, decoding: int, proposed: float) -> None:
        """Whether what the heads added to the trees was worth their time, and they look ahead again."""
        gained = self.drafter.gained if isinstance(self.drafter, HybridDrafter) else proposed
        share = gained / proposed if proposed > 0 else 0.0
        kept = budget.expected_tokens - decoding
        saved_s = share * (kept * plain.seconds / decoding - (budget.option.seconds - plain.seconds))
        if saved_s > self._look_ahead_s.expected(plain.size.sequences):
            self._heads_patience.rewarded()
        else:
            self._heads_patience.tried(_LONGEST_WAIT)

    def _longest_wait(self, asked: int, plain_s: float) -> int:
        """Steps to wait between fruitless proposals, so that they take little of the time."""
        share = asked * median(self._ask_s) / plain_s
        return min(_LONGEST_WAIT, math.ceil(share / _SHARE_OF_STEP_FOR_PROBES) - 1)

    def _fitting(self, tokens: int, sequences: int, rows: int) -> StepShape:
        shape = smallest_fitting(self.shapes, tokens, sequences, rows)
        assert shape is not None, (tokens, rows, sequences)
        return shape

    def _propose(self, drafting: Sequence[StepEntry], nodes: int) -> list[DraftTree]:
        """The drafter's trees of at most `nodes` nodes, set as the entries' too."""
        assert self.drafter is not None
        self.catch_up()
        keys: list[Hashable] = [entry.sequence.key for entry in drafting]
        trees = self.drafter.propose(keys, [nodes] * len(keys))
        if len(trees) != len(keys):
            raise DraftError(f"the drafter was asked for {len(keys)} trees and returned {len(trees)}")
        if self.trie is None:
            for tree in trees:
                tree.validate(max_nodes=nodes, vocab_size=self.vocab_size)
        else:
            largest = max((int(tree.tokens.max()) for tree in trees if len(tree)), default=0)
            if largest >= self.vocab_size:
                raise DraftError(
                    f"the drafter's history has token {largest}, outside this model's vocabulary of "
                    f"{self.vocab_size}; it comes from another model"
                )
        trees = [
            within_depth(tree, entry.sequence.room - 1) for tree, entry in zip(trees, drafting, strict=True)
        ]
        for entry, tree in zip(drafting, trees, strict=True):
            entry.tree = tree if len(tree) else None
        return trees

    # What steps cost

    def measured(self, plan: StepPlan, device_s: float) -> None:
        """The device took so long (without compilation)."""
        if plan.looks_ahead:
            sequences = plan.shape.sequences
            if self.times.knows(plan.shape):
                self._look_ahead_s.record(sequences, device_s - self.times.expected(plan.shape, plan.cached))
            device_s = max(0.0, device_s - self._look_ahead_s.expected(sequences))
            if device_s == 0.0 or not self._look_ahead_s.knows(sequences):
                return
        self.times.record(plan.shape, device_s, plan.cached)

    def measured_host(self, plan: StepPlan, host_s: float) -> None:
        """The host took so long besides."""
        if plan.only_decodes:
            self.host_times.record(plan.asked, host_s)


def parts_of(drafter: Drafter | None) -> tuple[TrieDrafter | None, HeadDrafter | None]:
    """The trie and the heads that a drafter consists of; None for others' drafters."""
    if isinstance(drafter, HybridDrafter):
        return drafter.trie, drafter.heads
    return (
        drafter if isinstance(drafter, TrieDrafter) else None,
        drafter if isinstance(drafter, HeadDrafter) else None,
    )


def first_nodes(tree: DraftTree, count: int) -> DraftTree:
    """The first `count` nodes; a parent comes before its children, so they are a tree."""
    if count == len(tree):
        return tree
    return DraftTree(tree.tokens[:count], tree.parents[:count], tree.probs[:count])


def within_depth(tree: DraftTree, depth: int) -> DraftTree:
    """Without the nodes more than `depth` tokens below the root, which the length limit would cut."""
    if len(tree) <= depth:  # no path can be longer than all nodes
        return tree
    keep = np.flatnonzero(tree.depths() <= depth)
    if len(keep) == len(tree):
        return tree
    number = np.full(len(tree) + 1, -1, np.int32)
    number[keep] = np.arange(len(keep), dtype=np.int32)
    return DraftTree(tree.tokens[keep], number[tree.parents[keep]], tree.probs[keep])
