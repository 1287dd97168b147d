"""TRL: rollouts of a `GRPOTrainer` by an engine in the trainer's process.

    engine = RolloutEngine.from_pretrained(folder, EngineConfig(...))
    trainer = GRPOTrainer(...)                       # use_vllm=False
    RolloutSpecGeneration.install(trainer, engine)   # takes the place of trainer.vllm_generation

or, without the correction of sampling by importance, which TRL applies to its own backends alone:

    trainer = GRPOTrainer(..., rollout_func=make_rollout_func(engine))

Both push the trainer's weights before the first rollouts behind each optimizer step, and return log-probabilities as
the trainer recomputes them: over the whole vocabulary, at the temperature sampled with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from rollout_spec.integrations.versions import check

from rollout_spec import Completion, RolloutEngine, SamplingParams, WeightUpdateReport
from rollout_spec.errors import ConfigError

TESTED = ("1.16", "1.17")
"""From, and below."""


def named_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, torch tensor) of a transformers model; tied weights come once.

    Raises ConfigError for a PEFT model, whose weights are not the policy's until they are merged.
    """
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "the trainer's model is a PEFT model: push merged weights, or the adapter's folder, with "
            "engine.update_weights"
        )
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def sync(engine: RolloutEngine, trainer: Any) -> WeightUpdateReport:
    """Gives the engine the trainer's weights."""
    return engine.update_weights(named_weights(trainer.accelerator.unwrap_model(trainer.model)))


def sampling_of(trainer: Any, n: int) -> SamplingParams:
    """The trainer's own sampling parameters."""
    if getattr(trainer.args, "generation_kwargs", None):
        raise ConfigError(
            f"generation_kwargs {sorted(trainer.args.generation_kwargs)} aren't read here; set the trainer's own "
            "arguments"
        )
    return SamplingParams(
        n=n,
        temperature=trainer.temperature,
        top_p=1.0 if trainer.top_p is None else trainer.top_p,
        top_k=max(0, trainer.top_k or 0),
        min_p=0.0 if trainer.min_p is None else trainer.min_p,
        repetition_penalty=1.0 if trainer.repetition_penalty is None else trainer.repetition_penalty,
        max_tokens=trainer.max_completion_length,
    )


def trainer_logprobs(completion: Completion) -> list[float]:
    """Of each token over the whole vocabulary at the temperature sampled with, as the trainer computes them."""
    return (completion.sampled_logprobs + np.log(completion.kept_mass)).tolist()


class RolloutSpecGeneration:
    """Stands where `trainer.vllm_generation` stands: `sync_weights` and `generate`."""

    def __init__(self, trainer: Any, engine: RolloutEngine) -> None:
        check("trl", *TESTED, extra="trl")
        self.trainer = trainer
        self.engine = engine
        self.last_update: WeightUpdateReport | None = None

    @classmethod
    def install(cls, trainer: Any, engine: RolloutEngine) -> RolloutSpecGeneration:
        """Makes the trainer generate with the engine. The trainer must have been made with use_vllm=False."""
        if trainer.use_vllm:
            raise ConfigError(
                "the trainer was made with use_vllm=True and holds a vLLM of its own; make it with False"
            )
        generation = cls(trainer, engine)
        trainer.vllm_generation = generation
        trainer.use_vllm = True
        trainer.vllm_mode = "server"  # what "colocate" does beyond this is vLLM's own business
        trainer._last_loaded_step = -1
        return generation

    def sync_weights(self) -> None:
        """Called by the trainer behind each optimizer step, before it generates."""
        self.last_update = sync(self.engine, self.trainer)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Any,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Completions of token id prompts, each of which stands `num_generations` times, side by side.

        Returns prompts, completions, and for each token a list of one log-probability and one of its id.
        """
        if images is not None and any(image is not None for image in images):
            raise ConfigError("the engine generates from text only, and the prompts have images")
        given = [list(map(int, prompt)) for prompt in prompts]
        with profiler or nullcontext():
            completions = list(_complete(self.engine, self.trainer, given))
        ids = [completion.token_ids.tolist() for completion in completions]
        logprobs = [[[value] for value in trainer_logprobs(completion)] for completion in completions]
        return given, ids, logprobs, [[[token] for token in row] for row in ids]


def make_rollout_func(engine: RolloutEngine) -> Callable[[list[Any], Any], dict[str, Any]]:
    """For `GRPOTrainer(rollout_func=...)`: pushes the weights and generates.

    Beside TRL's three keys it returns `weight_versions`, which reward functions get too. TRL doesn't use the returned
    log-probabilities to correct for the sampler (only its own backends' are); use `RolloutSpecGeneration` for that.
    """
    check("trl", *TESTED, extra="trl")
    last_step: list[int | None] = [None]

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if last_step[0] != trainer.state.global_step:
            sync(engine, trainer)
            last_step[0] = trainer.state.global_step
        ids = [_token_ids(prompt, trainer) for prompt in prompts]
        completions = list(_complete(engine, trainer, ids))
        return {
            "prompt_ids": ids,
            "completion_ids": [completion.token_ids.tolist() for completion in completions],
            "logprobs": [trainer_logprobs(completion) for completion in completions],
            "weight_versions": [completion.weight_versions.tolist() for completion in completions],
        }

    return rollout


def _complete(engine: RolloutEngine, trainer: Any, prompts: list[list[int]]) -> Iterator[Completion]:
    """One completion a prompt, in order. Equal ones side by side are a group, so that their prompt is computed once."""
    groups = [(prompt, len(list(run))) for prompt, run in itertools.groupby(prompts)]
    sampling = [sampling_of(trainer, n) for _, n in groups]
    for output in engine.generate([prompt for prompt, _ in groups], sampling):
        yield from output.completions


def _token_ids(prompt: Any, trainer: Any) -> list[int]:
    """A text's or a chat's ids, as the trainer itself would make them."""
    processing = trainer.processing_class
    if isinstance(prompt, str):
        return list(processing(text=prompt)["input_ids"])
    ids = processing.apply_chat_template(
        prompt,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(trainer.chat_template_kwargs or {}),
    )["input_ids"]
    return list(ids)
