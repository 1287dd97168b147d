# /// script
# requires-python = ">=3.11"
# dependencies = ["reasoning-gym==0.1.25"]
# ///
"""Writes letter_counting.jsonl: letter counting tasks of reasoning-gym, one JSON object a line.

Kept apart from the demo, which reads the file, because reasoning-gym needs a C compiler to install.

    python examples/data/make_letter_counting.py
"""

from __future__ import annotations

import json
from pathlib import Path

import reasoning_gym

COUNT = 64
SEED = 2889


def main() -> None:
    """Writes COUNT tasks with distinct questions; texts are in small letters, so that case can't mislead."""
    dataset = reasoning_gym.create_dataset(
        "letter_counting", min_words=3, max_words=4, size=4 * COUNT, seed=SEED
    )
    tasks = {}
    for item in dataset:
        words = [word.lower() for word in item["metadata"]["span"]]
        if all(word.isalpha() and word.isascii() for word in words):
            letter = item["metadata"]["target_letter"]
            tasks[(*words, letter)] = {"words": words, "letter": letter, "answer": int(item["answer"])}
    lines = [json.dumps(task) for task in list(tasks.values())[:COUNT]]
    Path(__file__).with_name("letter_counting.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
