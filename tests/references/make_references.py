"""Make the stored results that the tests compare with: run with torch, transformers, accelerate and
sentencepiece installed.

    .venv-torch/bin/python -m tests.references.make_references

Writes beside itself:
    logits.npz        transformers' logits of every case of `cases.CASES`, float32 [B, T, V]
    smollm2.npz       transformers' logits of SmolLM2 (read from the GGUF file by transformers' own reader):
                      chosen columns, log-sum-exp and argmax of every row
    tokenizers.json   token ids of `cases.TRICKY_TEXTS` and `cases.CHATS` by plain byte-level BPE, and a small
                      SentencePiece vocabulary with ids by sentencepiece itself
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch

from examples import smollm2
from tests.references import cases, plain_tokenizers
from tests.references.models_of_transformers import build_model, load_smollm2, model_logits

FOLDER = Path(__file__).parent


def sentencepiece_reference() -> dict[str, Any]:
    """Pieces, scores and types as GGUF files hold them, of a vocabulary like Llama 2's, and ids by it."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([cases.SMOLLM2_TEXT, *cases.TRICKY_TEXTS[4:6], *cases.TRICKY_TEXTS[9:]] * 4),
        model_writer=trained,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    size = processor.get_piece_size()
    types = []
    for index in range(size):
        flags = {2: processor.is_unknown, 3: processor.is_control, 6: processor.is_byte}
        types.append(next((kind for kind, holds in flags.items() if holds(index)), 1))
    texts = cases.TRICKY_TEXTS[:10]
    return {
        "tokens": [processor.id_to_piece(index) for index in range(size)],
        "scores": [processor.get_score(index) for index in range(size)],
        "types": types,
        "texts": texts,
        "ids": [processor.encode(text) for text in texts],
        "decoded": [processor.decode(processor.encode(text)) for text in texts],
    }


def main() -> None:
    logits = {}
    for name, raw in cases.CASES.items():
        logits[name] = model_logits(build_model(raw), *cases.inputs(raw["vocab_size"]))
        print(f"{name}: logits of deviation {logits[name].std():.2f}")
    np.savez_compressed(FOLDER / "logits.npz", **logits)

    path = smollm2.fetch()
    reference = plain_tokenizers.smollm2(path)
    token_ids = np.array([reference.encode(cases.SMOLLM2_TEXT)], dtype=np.int32)
    rows = model_logits(load_smollm2(path), token_ids)[0]
    np.savez_compressed(
        FOLDER / "smollm2.npz",
        token_ids=token_ids,
        columns=rows[:, cases.SMOLLM2_COLUMNS],
        log_sum_exp=torch.logsumexp(torch.from_numpy(rows), dim=-1).numpy(),
        argmax=rows.argmax(axis=-1).astype(np.int32),
    )
    print(f"SmolLM2: {token_ids.shape[1]} tokens")

    stored: dict[str, Any] = {}
    for kind in ("smollm", "gpt-2", "llama-bpe", "qwen2"):
        plain = plain_tokenizers.smollm2(path, kind)
        stored[kind] = [plain.encode(text) for text in cases.TRICKY_TEXTS]
    stored["chats"] = [reference.encode(plain_tokenizers.chat_ml(chat)) for chat in cases.CHATS]
    stored["sentencepiece"] = sentencepiece_reference()
    (FOLDER / "tokenizers.json").write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main()
