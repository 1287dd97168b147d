"""The sizes that steps are compiled for: few, and enough for whatever the scheduler plans."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec import DraftConfig, EngineConfig
from rollout_spec.shapes import sequence_counts, smallest_fitting, step_shapes
from rollout_spec.step import StepShape


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    max_seqs = draw(st.integers(1, 300))
    return EngineConfig(
        max_seqs=max_seqs,
        max_batch_tokens=draw(st.integers(max_seqs, 3000)),
        draft=DraftConfig(
            kind=draw(st.sampled_from(["trie", "none"])),
            max_nodes=draw(st.integers(0, 63)),
        ),
    )


@given(configs())
@settings(max_examples=200, deadline=None)
def test_sizes_are_few_sorted_and_consistent(config: EngineConfig) -> None:
    shapes = step_shapes(config)
    assert list(shapes) == sorted(set(shapes))
    assert len(shapes) <= 56
    for shape in shapes:
        assert 1 <= shape.sequences <= min(8 * shape.tokens, config.max_seqs)
        assert 1 <= shape.rows <= shape.tokens <= config.max_batch_tokens
    largest = shapes[-1]
    assert (largest.tokens, largest.sequences) == (config.max_batch_tokens, config.max_seqs)
    assert all(shape.rows <= largest.rows or shape.tokens == shape.rows for shape in shapes)


@given(configs(), st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_the_scheduler_may_plan_fits_one(config: EngineConfig, data: st.DataObject) -> None:
    """Every running sequence with at least a token, and no more tokens and rows than the largest size has."""
    shapes = step_shapes(config)
    sequences = data.draw(st.integers(1, config.max_seqs))
    tokens = data.draw(st.integers(sequences, shapes[-1].tokens))
    rows = data.draw(st.integers(0, min(tokens, shapes[-1].rows)))
    assert smallest_fitting(shapes, tokens, sequences, rows) is not None


@given(configs(), st.data())
@settings(max_examples=200, deadline=None)
def test_plain_decoding_wastes_little(config: EngineConfig, data: st.DataObject) -> None:
    """A token for each of k sequences: at most twice as many are computed, and none too many of all."""
    sequences = data.draw(st.integers(1, config.max_seqs))
    shape = smallest_fitting(step_shapes(config), sequences, sequences, sequences)
    assert shape is not None
    assert shape.tokens <= 2 * sequences
    exact = smallest_fitting(step_shapes(config), config.max_seqs, config.max_seqs, config.max_seqs)
    assert exact is not None
    assert exact.tokens == config.max_seqs


@given(configs())
@settings(max_examples=200, deadline=None)
def test_one_sequence_alone_can_verify_its_largest_tree(config: EngineConfig) -> None:
    nodes = 0 if config.draft.kind == "none" else config.draft.max_nodes
    wanted = min(nodes + 1, config.max_batch_tokens)
    shape = smallest_fitting(step_shapes(config), wanted, 1, wanted)
    assert shape is not None
    assert shape.tokens < wanted + 8


def test_without_drafts_there_are_only_sizes_for_plain_steps_and_prompts() -> None:
    config = EngineConfig(max_seqs=16, max_batch_tokens=256, draft=DraftConfig(kind="none"))
    assert step_shapes(config) == (
        StepShape(1, 1, 1),
        StepShape(2, 4, 2),
        StepShape(4, 4, 4),
        StepShape(8, 16, 8),
        StepShape(12, 16, 12),
        StepShape(16, 16, 16),
        StepShape(64, 1, 32),
        StepShape(64, 16, 32),
        StepShape(128, 1, 32),
        StepShape(192, 1, 32),
        StepShape(256, 1, 32),
        StepShape(256, 16, 32),
    )


def test_counts_of_sequences_grow_fourfold_and_end_with_the_most() -> None:
    assert sequence_counts(1) == [1]
    assert sequence_counts(4) == [1, 4]
    assert sequence_counts(7) == [1, 7]
    assert sequence_counts(8) == [1, 4, 8]
    assert sequence_counts(100) == [1, 4, 16, 100]


@given(
    st.lists(st.builds(StepShape, *[st.integers(1, 9)] * 3), max_size=8),
    st.tuples(*[st.integers(0, 9)] * 3),
)
@settings(deadline=None)
def test_smallest_fitting_is_the_least_of_all_that_fit(
    shapes: list[StepShape], wanted: tuple[int, int, int]
) -> None:
    tokens, sequences, rows = wanted
    fitting = [s for s in shapes if s.tokens >= tokens and s.sequences >= sequences and s.rows >= rows]
    assert smallest_fitting(sorted(shapes), tokens, sequences, rows) == min(fitting, default=None)
