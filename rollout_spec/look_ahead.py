"""The part of a step in which the policy's own multi-token-prediction heads draft for the next one.

Each head caches keys and values in pages of its own, as one more layer of the trunk's page table: what accepts, moves,
shares and frees the trunk's caches does the same to the heads'. The entry of slot i is what the head makes of the token
behind i, t[i + 1], and

- head 0: of the trunk's state at i;
- head d: of head d - 1's state at i - 1, as the published equations have it but for their numbering: they put this
  entry, which scores t[i + 2], at i - d. Attention sees distances only, so they are the same; just the first d entries
  of a sequence are none of theirs, and made with a state of zeros.

States that the next step needs of slots before its own are kept in pages too (`head_states`), so that shared prefixes
have them. A page's content therefore depends on as many tokens behind it as there are heads: its digest holds them.

After acceptance the heads look ahead of the last accepted slot L, whose next token is the one just sampled: head 0
has scored t[L + 2] already; with its choice as the next token of slot L + 1 head 1 scores t[L + 3], and so on; behind
the last head that head goes on from its own state. Entries behind L are overwritten by the next step's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from .kernels.sampling import TreeSample
from .models.decoder import DecoderModel
from .models.layers import Attend
from .step_inputs import StepBatch


@dataclasses.dataclass(frozen=True)
class LookAhead:
    """How far the heads look, and how many tokens they name at each depth."""

    depth: int
    choices: int


class Drafts(NamedTuple):
    """What the heads propose behind each sequence's last token."""

    tokens: (
        jax.Array
    )  # int32[S, depth, choices], the likeliest first; each depth follows the first of the one before
    probs: jax.Array  # float32[S, depth, choices], the head's probabilities


class HeadStates(NamedTuple):
    """The heads' states at all tokens of a step, for each head."""

    passed_on: list[jax.Array]  # [T, E], what the next head takes
    scored: list[jax.Array]  # [T, E], what is unembedded


def fill_caches(
    model: DecoderModel,
    batch: StepBatch,
    trunk_states: jax.Array,
    sample: TreeSample,
    kept: tuple[jax.Array, ...],
    attend: Attend,
) -> HeadStates:
    """Runs the heads over the step's tokens; `attend` writes their caches where the trunk's are.

    trunk_states [T, E], before the final norm. kept: `head_states`, one array [pages, page_size, E] for
    each head but the last. For tokens that were not accepted the results mean nothing, and are overwritten later.
    """
    assert model.mtp is not None
    num_tokens = batch.token_ids.shape[0]
    embeddings = model.embed(_next_tokens(batch, sample, num_tokens))
    table = model.rotary_table(batch.positions, model.config.num_layers)
    hidden = model.mtp_input(trunk_states)
    found = HeadStates([], [])
    for number in range(len(model.mtp.heads)):
        if number:
            hidden = _states_before(batch, found.passed_on[-1], kept[number - 1])
        passed_on, scored = model.mtp.predict(number, embeddings, hidden, table, attend)
        found.passed_on.append(passed_on)
        found.scored.append(scored)
    return found


def _next_tokens(batch: StepBatch, sample: TreeSample, num_tokens: int) -> jax.Array:
    """int32[T]: the token behind each: the text's where it is known, or what was sampled there."""
    rows = jnp.where(batch.row_in_use, batch.row_tokens, num_tokens)
    sampled = jnp.zeros((num_tokens,), jnp.int32).at[rows].set(sample.tokens, mode="drop")
    return jnp.where(batch.next_ids >= 0, batch.next_ids, sampled)


def _states_before(batch: StepBatch, states: jax.Array, pages: jax.Array) -> jax.Array:
    """[T, E]: the states of the slots before each token's: of this step, or kept; zeros before the first slot."""
    before = jnp.maximum(batch.positions - 1, 0)
    kept = pages[_page_of(batch, before, pages.shape[1]), before % pages.shape[1]]
    kept = jnp.where((batch.positions > 0)[:, None], kept, 0)
    return jnp.where((batch.previous >= 0)[:, None], states[batch.previous], kept)


def _page_of(batch: StepBatch, slots: jax.Array, page_size: int) -> jax.Array:
    """int32[T]: pages that hold `slots` of the sequences of the step's tokens."""
    tokens = jnp.arange(batch.token_ids.shape[0])
    sequence = jnp.sum(tokens[:, None] >= batch.cu_q_lens[None, 1:], axis=-1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, batch.page_table.shape[0] - 1)
    return batch.page_table[sequence, slots // page_size]


def keep_states(
    batch: StepBatch, states: HeadStates, accepted: jax.Array, pages: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Writes the states of the tokens that stay to `head_states`.

    accepted bool[R]. A node's position is the slot that it gets once it is accepted.
    """
    num_tokens = batch.token_ids.shape[0]
    stays = jnp.arange(num_tokens) < batch.cu_q_lens[batch.num_seqs[0]]
    rejected = batch.row_in_use & (batch.rows.parents >= 0) & ~accepted
    rows = jnp.where(rejected, batch.row_tokens, num_tokens)
    stays = stays.at[rows].set(False, mode="drop")
    kept = []
    for number, held in enumerate(pages):
        page_size = held.shape[1]
        page = jnp.where(stays, _page_of(batch, batch.positions, page_size), held.shape[0])
        offset = batch.positions % page_size
        kept.append(held.at[page, offset].set(states.passed_on[number].astype(held.dtype), mode="drop"))
    return tuple(kept)


def draft(
    model: DecoderModel,
    ahead: LookAhead,
    batch: StepBatch,
    sample: TreeSample,
    emitted: jax.Array,
    states: HeadStates,
    pages: tuple[jax.Array, ...],
    attend_to: Callable[..., tuple[Attend, list[jax.Array]]],
    unembed: Callable[[jax.Array], jax.Array],
) -> tuple[Drafts, tuple[jax.Array, ...]]:
    """Looks ahead of the last token of each sequence with `batch.draft_depths` above 0.

    emitted bool[R]. pages: of trunk and heads, the last page of each is nobody's: what must not be kept goes there.
    attend_to: makes the attention of one token a sequence over given pages, from kv_lens and page_table.
    unembed: float32[S, V] of [S, E].
    """
    heads = model.mtp
    assert heads is not None
    num_sequences, num_rows = batch.kv_lens.shape[0], batch.row_tokens.shape[0]
    rows = batch.rows
    ends = jax.ops.segment_max(
        jnp.where(emitted, rows.positions, -1), rows.sequences, num_segments=num_sequences
    )
    is_last = emitted & (rows.positions == ends[rows.sequences])
    last = jax.ops.segment_max(
        jnp.where(is_last, jnp.arange(num_rows), -1), rows.sequences, num_segments=num_sequences
    )
    depths = jnp.where(last >= 0, batch.draft_depths, 0)
    last_token = batch.row_tokens[jnp.maximum(last, 0)]
    count = len(heads.heads)
    hidden = [passed_on[last_token] for passed_on in states.passed_on]  # of each head, at the last slot
    tokens = jnp.full((num_sequences, ahead.depth, ahead.choices), -1, jnp.int32)
    probs = jnp.zeros((num_sequences, ahead.depth, ahead.choices), jnp.float32)

    def name(
        depth: int, tokens: jax.Array, probs: jax.Array, scored: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        chosen, likely = _likeliest(unembed(scored), ahead.choices)
        return tokens.at[:, depth].set(chosen), probs.at[:, depth].set(likely)

    def first(carry: Any) -> Any:
        _, tokens, probs, hidden, pages = carry
        return (jnp.bool_(False), *name(0, tokens, probs, states.scored[0][last_token]), hidden, pages)

    def further(depth: int) -> Callable[[Any], Any]:
        def body(carry: Any) -> Any:
            _, tokens, probs, hidden, pages = carry
            active = depths > depth
            slots = jnp.where(active, ends - 1 + depth, 0)
            nobodys = pages[0].shape[1] - 1
            table = jnp.where(active[:, None], batch.page_table, nobodys)
            attend, held = attend_to(pages, slots + 1, table)
            embeddings = model.embed(jnp.maximum(tokens[:, depth - 1, 0], 0))
            rotary = model.rotary_table(slots, model.config.num_layers)
            runs = range(depth, count) if depth < count else [count - 1]
            new, scored = list(hidden), None
            for number in runs:
                before = hidden[number - 1] if depth < count else hidden[number]
                new[number], normed = heads.predict(number, embeddings, before, rotary, attend)
                scored = normed if scored is None else scored
            assert scored is not None
            return (jnp.bool_(False), *name(depth, tokens, probs, scored), new, tuple(held))

        return body

    carry: Any = (tokens, probs, hidden, pages)
    for depth in range(ahead.depth):
        carry = _once(jnp.any(depths > depth), first if depth == 0 else further(depth), carry)
    tokens, probs, _, pages = carry
    return Drafts(tokens, probs), pages


Carry = TypeVar("Carry")


def _once(wanted: jax.Array, body: Callable[[Any], Any], carry: Carry) -> Carry:
    """A loop of at most one round, not a cond: XLA updates a loop's carry in place, where a cond would copy."""
    return jax.lax.while_loop(lambda state: state[0], body, (wanted, *carry))[1:]  # type: ignore[misc,return-value]


def _likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """int32[S, count] and float32[S, count]: the likeliest tokens of logits [S, V], and their probabilities."""
    total = jax.nn.logsumexp(logits, axis=-1)
    tokens, probs = [], []
    columns = jnp.arange(logits.shape[-1])
    for _ in range(count):  # a few passes; sorting a vocabulary costs far more
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        score = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
        tokens.append(best)
        probs.append(jnp.exp(score - total))
        logits = jnp.where(columns[None, :] == best[:, None], -jnp.inf, logits)
    return jnp.stack(tokens, axis=1), jnp.stack(probs, axis=1)
