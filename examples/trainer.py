"""The training half of the GRPO demo, in plain JAX and optax: advantages, loss and optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from rollout_spec import Completion, RolloutOutput, models
from rollout_spec.models import ModelConfig, Params


class Rows(NamedTuple):
    """Completions behind their prompts, padded at the right; entry [b, t] is about the token at t + 1.

    A micro-batch has a fixed number of rows and one of few lengths, so that the loss compiles few times.
    """

    token_ids: NDArray[np.int32]  # [B, T + 1]
    sampled: NDArray[np.bool_]  # [B, T] the policy sampled that token: not prompt, not padding
    behaviour_logprobs: NDArray[np.float32]  # [B, T] its log-probability, as the engine reports it
    advantages: NDArray[np.float32]  # [B, T]


class UpdateMetrics(NamedTuple):
    """loss: of the whole batch. logprob_gap: largest difference of trainer's and engine's log-probability."""

    loss: float
    logprob_gap: float


def group_advantages(rewards: Sequence[float]) -> NDArray[np.float32]:
    """How much better than its group each completion is, in standard deviations (GRPO, arXiv 2402.03300)."""
    group = np.asarray(rewards, np.float32)
    return (group - group.mean()) / (group.std() + 1e-4)


def behaviour_logprobs(completion: Completion) -> NDArray[np.float32]:
    """float32[T] log-probabilities over the whole vocabulary at the sampling temperature.

    `sampled_logprobs` is relative to what top-k, top-p and min-p kept; the kept mass undoes that.
    """
    return completion.sampled_logprobs + np.log(completion.kept_mass)


def make_rows(
    outputs: Sequence[RolloutOutput],
    rewards: Sequence[Sequence[float]],
    rows: int,
    lengths: Sequence[int],
    oldest_version: int | None = None,
) -> Iterator[Rows]:
    """Micro-batches of `rows` rows, each padded to the least of `lengths` that holds it.

    oldest_version: tokens of older weights than these count as context only.

    Groups whose completions all have the same reward have advantage 0, so no gradient: they are left out.
    """
    entries = [
        (output.prompt_token_ids, completion, advantage)
        for output, group in zip(outputs, rewards, strict=True)
        for completion, advantage in zip(output.completions, group_advantages(group), strict=True)
        if len(set(group)) > 1
    ]
    entries.sort(key=lambda entry: len(entry[0]) + len(entry[1].token_ids))
    for start in range(0, len(entries), rows):
        chunk = entries[start : start + rows]
        longest = max(len(prompt) + len(completion.token_ids) for prompt, completion, _ in chunk)
        length = min(length for length in lengths if length >= longest)
        shape = (rows, length - 1)
        batch = Rows(
            np.zeros((rows, length), np.int32),
            np.zeros(shape, bool),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.float32),
        )
        for row, (prompt, completion, advantage) in enumerate(chunk):
            end = len(prompt) + len(completion.token_ids)
            batch.token_ids[row, :end] = [*prompt, *completion.token_ids]
            predicts = slice(len(prompt) - 1, end - 1)  # the places whose next token was sampled
            batch.sampled[row, predicts] = (
                True if oldest_version is None else completion.weight_versions >= oldest_version
            )
            batch.behaviour_logprobs[row, predicts] = behaviour_logprobs(completion)
            batch.advantages[row, predicts] = advantage
        yield batch


@dataclass(frozen=True)
class Objective:
    """The clipped policy-gradient objective of PPO (arXiv 1707.06347), averaged over tokens."""

    config: ModelConfig
    temperature: float
    clip: float = 0.2

    def token_logprobs(self, params: Params, token_ids: jax.Array) -> jax.Array:
        """float32[B, T] log-probabilities of tokens 1 .. T of int32[B, T + 1]."""
        logits = models.apply(self.config, params, token_ids[:, :-1]) / self.temperature  # [B, T, V]
        chosen = jnp.take_along_axis(logits, token_ids[:, 1:, None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    def loss(self, params: Params, rows: Rows, total_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """These rows' part of the mean over the batch's tokens, and the largest log-probability gap."""
        log_ratio = self.token_logprobs(params, jnp.asarray(rows.token_ids)) - rows.behaviour_logprobs
        log_ratio = jnp.where(rows.sampled, log_ratio, 0.0)
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1.0 - self.clip, 1.0 + self.clip)
        gain = jnp.minimum(ratio * rows.advantages, clipped * rows.advantages)
        return -jnp.sum(gain) / total_tokens, jnp.max(jnp.abs(log_ratio))


class Trainer:
    """Weights, optimizer state, and the compiled functions that change them."""

    def __init__(
        self, params: Params, objective: Objective, optimizer: optax.GradientTransformation, *, rows: int
    ) -> None:
        self.params = params
        self.rows = rows
        self._optimizer_state = optimizer.init(params)

        def add_gradients(total: Params, params: Params, rows: Rows, tokens: jax.Array) -> tuple[Params, Any]:
            metrics, gradients = jax.value_and_grad(objective.loss, has_aux=True)(params, rows, tokens)
            return jax.tree.map(jnp.add, total, gradients), metrics

        def apply_gradients(params: Params, state: Any, gradients: Params) -> tuple[Params, Any]:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        # params are not donated: an engine may serve the same arrays.
        self._add_gradients = jax.jit(add_gradients, donate_argnums=0)
        self._apply_gradients = jax.jit(apply_gradients, donate_argnums=(1, 2))

    def update(
        self,
        outputs: Sequence[RolloutOutput],
        rewards: Sequence[Sequence[float]],
        lengths: Sequence[int],
        *,
        oldest_version: int | None = None,
    ) -> UpdateMetrics:
        """One optimizer step on all completions. rewards: one list a prompt, one number a completion."""
        batches = list(make_rows(outputs, rewards, self.rows, lengths, oldest_version))
        if not batches:  # every group is all right or all wrong: nothing to learn from
            return UpdateMetrics(0.0, 0.0)
        tokens = jnp.float32(max(1, sum(int(batch.sampled.sum()) for batch in batches)))
        gradients = jax.tree.map(jnp.zeros_like, self.params)
        loss = gap = 0.0
        for batch in batches:
            gradients, (batch_loss, batch_gap) = self._add_gradients(gradients, self.params, batch, tokens)
            loss, gap = loss + float(batch_loss), max(gap, float(batch_gap))
        self.params, self._optimizer_state = self._apply_gradients(
            self.params, self._optimizer_state, gradients
        )
        return UpdateMetrics(loss, gap)
