"""TRL's GRPOTrainer with rollouts by the engine: a tiny Llama learns to say "a", on a CPU in seconds.

    pip install "rollout-spec[trl]"
    python -m examples.grpo_trl [--steps 40] [--with-rollout-func]

Prints, behind each optimizer step, the reward, the engine's weight version, and TRL's own ratio of importance between
what the engine sampled with and what the trainer recomputes, which is 1 where both have the same weights.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_spec.integrations.trl import RolloutSpecGeneration, make_rollout_func

from rollout_spec import EngineConfig, RolloutEngine

LETTERS = "abcdefgh "
PROMPTS = ["abc", "hgf ", "dead", "cab a"]


def tiny_model(folder: Path) -> tuple[Any, Any]:
    """A random Llama over letters, and its tokenizer, also written to `folder`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, **{letter: 2 + index for index, letter in enumerate(LETTERS)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token=" "
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def share_of_a(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of a completion's letters that are an "a"."""
    return [text.count("a") / max(1, len(text)) for text in completions]


def train(
    steps: int, *, with_rollout_func: bool = False
) -> tuple[Any, RolloutEngine, list[dict[str, float]]]:
    """Trains; returns the trainer, the engine, and what was logged behind each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = tiny_model(Path(folder))
        engine = RolloutEngine.from_pretrained(folder, EngineConfig(max_seqs=8, max_batch_tokens=64))
        args = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=12,
            learning_rate=3e-3,
            temperature=0.9,
            beta=0.0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            bf16=False,
            vllm_importance_sampling_correction=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=share_of_a,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
            processing_class=tokenizer,
            rollout_func=make_rollout_func(engine) if with_rollout_func else None,
        )
        if not with_rollout_func:
            RolloutSpecGeneration.install(trainer, engine)
        logged: list[dict[str, float]] = []

        class Log(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if logs and "reward" in logs:
                    ratio = logs.get("sampling/importance_sampling_ratio/mean")
                    logged.append({**logs, "weight_version": engine.weight_version})
                    print(
                        f"step {state.global_step}: reward {logs['reward']:.3f}, weights of version "
                        f"{engine.weight_version}"
                        + ("" if ratio is None else f", importance ratio {ratio:.5f}")
                    )

        trainer.add_callback(Log())
        trainer.train()
    return trainer, engine, logged


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--with-rollout-func", action="store_true")
    parsed = parser.parse_args(arguments)
    train(parsed.steps, with_rollout_func=parsed.with_rollout_func)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
