"""A collapse of acceptance is told once, with numbers, and ordinary fluctuation is not."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.draft.watch import AcceptanceWatch


def run(watch: AcceptanceWatch, rng: np.random.Generator, steps: int, prob: float, said: float) -> list[str]:
    """Warnings over steps with 8 draft nodes that hit with `prob` where the drafter said `said`."""
    warnings = []
    for _ in range(steps):
        warning = watch.note(8, 8 * said, int(rng.binomial(8, prob)))
        if warning is not None:
            warnings.append(warning)
    return warnings


@pytest.mark.parametrize("prob", [0.1, 0.5, 0.9])
def test_fluctuation_is_no_collapse(prob: float) -> None:
    assert run(AcceptanceWatch(), np.random.default_rng(0), 5000, prob, prob) == []


def test_a_collapse_is_told_once_and_again_only_after_a_recovery() -> None:
    watch, rng = AcceptanceWatch(), np.random.default_rng(0)
    assert run(watch, rng, 300, 0.6, 0.6) == []
    (warning,) = run(watch, rng, 300, 0.1, 0.6)
    assert "60% were expected" in warning
    assert 45 <= int(warning.rpartition(" ")[2].rstrip("%")) <= 65
    assert run(watch, rng, 300, 0.6, 0.6) == []
    assert len(run(watch, rng, 300, 0.1, 0.6)) == 1


def test_what_was_never_good_did_not_collapse() -> None:
    assert run(AcceptanceWatch(), np.random.default_rng(0), 2000, 0.1, 0.6) == []


def test_a_drafter_that_expects_as_little_as_comes_did_not_collapse() -> None:
    watch, rng = AcceptanceWatch(), np.random.default_rng(0)
    run(watch, rng, 300, 0.6, 0.6)
    assert run(watch, rng, 300, 0.1, 0.1) == []


def test_a_collapse_behind_an_update_names_both_versions() -> None:
    watch, rng = AcceptanceWatch(), np.random.default_rng(0)
    watch.new_version(4)
    run(watch, rng, 300, 0.6, 0.6)
    watch.new_version(5)
    (warning,) = run(watch, rng, 100, 0.05, 0.6)
    assert "under weights of version 4, and they are of version 5 now" in warning
    assert "heads" in warning
