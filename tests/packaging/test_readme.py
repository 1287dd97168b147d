"""What README.md and docs/ say can be followed: links lead somewhere, the loop runs, the table is what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tables
from rollout_spec import EngineConfig, RolloutEngine, RolloutOutput
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_tokenizer import tiny_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [
        target for target in targets if "://" not in target and not (page.parent / target).resolve().exists()
    ]
    assert not missing


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert not [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme]


def test_every_promise_test_is_named_in_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    files = sorted((REPOSITORY / "tests" / "promises").glob("test_*.py"))
    assert files
    assert not [file.name for file in files if f"(tests/promises/{file.name})" not in readme]


def test_the_loop_in_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (loop,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    model = tiny_model("llama")
    tokenizer = tiny_tokenizer(model.config.vocab_size, model.config.eos_token_ids)
    seen: list[list[RolloutOutput]] = []

    def from_pretrained(path: str) -> RolloutEngine:
        config = EngineConfig(max_seqs=4, max_batch_tokens=16)
        return RolloutEngine(model.config, model.params, tokenizer=tokenizer, config=config)

    def train_step(params: dict, outputs: list[RolloutOutput], rewards: list[list[float]]) -> dict:
        assert np.shape(rewards) == (2, 8)
        seen.append(outputs)
        return params

    monkeypatch.setattr(RolloutEngine, "from_pretrained", from_pretrained)
    names = {"prompts": ["ab", "ba"], "num_steps": 2, "reward": len, "train_step": train_step}
    exec(compile(loop, "README.md", "exec"), names)
    assert len(loop.splitlines()) <= 12
    versions = [{int(v) for c in outputs[0].completions for v in c.weight_versions} for outputs in seen]
    assert versions == [{0}, {1}]


def test_the_table_in_the_readme_is_the_stored_measurement() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert readme == tables.replace_table(readme, json.loads(tables.RESULTS.read_text()))


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="marks"):
        tables.replace_table("no marks", {})
