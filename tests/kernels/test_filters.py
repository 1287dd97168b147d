"""top-k, top-p and min-p keep what sorting says."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from numpy.typing import NDArray
from rollout_spec.kernels.sampling.filters import kept_tokens

from tests.helpers.plain_sampler import PlainSampling, filter_kept

LEAST_MARGIN = 1e-4

kept = jax.jit(kept_tokens)


def keep(logits: NDArray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> NDArray[np.bool_]:
    """bool[V] for one row of logits [V]."""
    row = np.asarray(logits, np.float32)[None]
    values = np.array([top_k], np.int32), np.array([top_p], np.float32), np.array([min_p], np.float32)
    return np.asarray(kept(row, *values))[0]


def random_logits(rng: np.random.Generator, vocab_size: int) -> NDArray[np.float32]:
    """Rows of every kind: smooth, with many ties, nearly flat, very sharp, of one sign; some have -inf."""
    logits = rng.normal(0, 3, vocab_size)
    kind = rng.integers(6)
    if kind == 1:
        logits = rng.integers(-3, 3, vocab_size).astype(float)
    elif kind == 2:
        logits = logits * 1e-3 + 5
    elif kind == 3:
        logits *= 30
    elif kind == 4:
        logits = -np.abs(logits) - 40
    elif kind == 5:
        logits = np.full(vocab_size, -2.5)
    if rng.random() < 0.4:
        banned = rng.random(vocab_size) < rng.choice([0.1, 0.9])
        banned[rng.integers(vocab_size)] = False
        logits[banned] = -np.inf
    return logits.astype(np.float32)


@pytest.mark.parametrize("vocab_size", [5, 256, 700])
def test_random_rows_keep_what_sorting_keeps(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    count = 300
    logits = np.stack([random_logits(rng, vocab_size) for _ in range(count)])
    top_k = rng.choice([0, 1, 2, 4, 40, vocab_size, vocab_size + 9], count).astype(np.int32)
    top_p = rng.choice([1.0, 0.05, 0.5, 0.9, 0.999], count).astype(np.float32)
    min_p = rng.choice([0.0, 0.0, 1e-3, 0.2, 1.0], count).astype(np.float32)
    found = np.asarray(kept(logits, top_k, top_p, min_p))
    compared = 0
    for row in range(count):
        sampling = PlainSampling(top_k=int(top_k[row]), top_p=float(top_p[row]), min_p=float(min_p[row]))
        expected, margin = filter_kept(logits[row].astype(np.float64), sampling)
        possible = np.isfinite(logits[row])  # keeping an impossible token makes no difference
        assert found[row, possible].any()
        if margin > LEAST_MARGIN:  # else float32 may put the boundary on either side
            compared += 1
            np.testing.assert_array_equal(found[row, possible], expected[possible], err_msg=str(sampling))
    assert compared > count / 2


def test_ties_at_the_boundary_are_kept() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 0.0, 2.0])
    assert keep(logits, top_k=2).tolist() == [False, True, True, True, False, True]
    assert keep(logits, top_p=0.5).tolist() == [False, True, True, True, False, True]
    assert keep(np.zeros(7), top_k=1).all()
    assert keep(np.zeros(7), top_p=0.01).all()
    assert keep(np.array([0.0, -0.0, -1.0]), top_k=1).tolist() == [True, True, False]


def test_each_filter_works_on_what_the_one_before_left() -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.log(probabilities)
    # Of the whole, 0.3 more are needed for 0.6; of the two that top-k left, renormalised, the first has 0.57.
    assert keep(logits, top_p=0.55).tolist() == [True, True, False, False]
    assert keep(logits, top_k=2, top_p=0.55).tolist() == [True, False, False, False]
    assert keep(logits, top_k=3, min_p=0.6).tolist() == [True, True, False, False]
    assert keep(logits, top_p=0.65, min_p=0.2).tolist() == [True, True, False, False]


def test_off_keeps_everything() -> None:
    logits = np.array([-1e30, 5.0, 0.0, -np.inf])
    assert keep(logits)[:3].all()
    assert keep(logits, top_k=4)[:3].all()
    assert keep(logits, top_k=2**31 - 1)[:3].all()


@pytest.mark.parametrize("top_p", [1e-6, 1e-30, 1e-40, 0.0])
@pytest.mark.parametrize("min_p", [0.0, 1.0])
def test_the_likeliest_token_is_always_kept(top_p: float, min_p: float) -> None:
    """Also for a top_p that float32 rounds or flushes to zero."""
    logits = np.array([0.5, 2.0, -3.0, 1.9])
    assert keep(logits, top_k=1, top_p=top_p, min_p=min_p).tolist() == [False, True, False, False]
    assert keep(logits, top_p=top_p, min_p=min_p).tolist() == [False, True, False, False]
