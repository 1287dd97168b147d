"""A watched folder: new whole checkpoints are taken, half-written ones never."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.errors import EngineStateError, WeightUpdateError
from tests.helpers.engines import new_engine
from tests.helpers.tiny_models import TinyModel
from tests.rollout_spec.weights.staged import NEW, OLD, assert_equal, hf_arrays

SETTLE_S = 0.01
SAMPLING = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)


@pytest.fixture
def engine() -> RolloutEngine:
    return new_engine(OLD, "cramped")


def written(path: Path, model: TinyModel) -> Path:
    path.mkdir(exist_ok=True)
    arrays = {name: np.ascontiguousarray(array) for name, array in hf_arrays(model).items()}
    save_file(arrays, path / "model.safetensors")
    return path


def versions(engine: RolloutEngine) -> set[int]:
    return set(engine.generate([[1, 2, 3]], SAMPLING)[0].completions[0].weight_versions.tolist())


def test_new_checkpoints_are_taken_by_whatever_runs_the_engine(engine: RolloutEngine, tmp_path: Path) -> None:
    watch = engine.watch(tmp_path, settle_s=SETTLE_S)
    assert versions(engine) == {0}
    written(tmp_path / "step_10", NEW)
    watch._next_look = 0
    assert versions(engine) == {10}
    assert_equal(engine.params, NEW.params)
    assert versions(engine) == {10}
    written(tmp_path / "step_9", OLD)
    assert watch.poll() is None, "an older one"
    written(tmp_path / "step_20", OLD)
    watch._next_look = 0
    engine.step()
    assert (engine.weight_version, [report.version for report in watch.reports]) == (20, [10, 20])
    assert_equal(engine.params, OLD.params)


def test_of_several_the_newest_is_taken_and_one_written_anew_is_new(
    engine: RolloutEngine, tmp_path: Path
) -> None:
    for number in (1, 2, 10):
        written(tmp_path / f"checkpoint-{number}", NEW if number == 10 else OLD)
    watch = engine.watch(tmp_path, settle_s=SETTLE_S)
    report = watch.poll()
    assert report is not None
    assert report.version == 10
    assert watch.poll() is None
    written(tmp_path / "checkpoint-10", OLD)
    report = watch.poll()
    assert report is not None
    assert report.version == 11, "10 serves already"
    assert_equal(engine.params, OLD.params)


def test_half_written_ones_are_never_taken(engine: RolloutEngine, tmp_path: Path) -> None:
    """Cut off at every length; shards without one of them; Orbax before it commits."""
    watch = engine.watch(tmp_path, settle_s=0.0)
    whole = (written(tmp_path.parent / f"{tmp_path.name}-whole", NEW) / "model.safetensors").read_bytes()
    half = tmp_path / "step_1"
    half.mkdir()
    for length in [0, 4, 8, 100, 1000, *range(5000, len(whole), 20_000), len(whole) - 1]:
        (half / "model.safetensors").write_bytes(whole[:length])
        assert watch.poll() is None
    index = (
        '{"weight_map": {"model.norm.weight": "a.safetensors", "model.embed_tokens.weight": "b.safetensors"}}'
    )
    shards = tmp_path / "step_2"
    shards.mkdir()
    save_file({"model.norm.weight": np.ones(32, np.float32)}, shards / "a.safetensors")
    (shards / "model.safetensors.index.json").write_text(index)
    assert watch.poll() is None
    (shards / "model.safetensors.index.json").write_text(index[: len(index) // 2])
    assert watch.poll() is None
    shutil.rmtree(shards)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path.parent / f"{tmp_path.name}-orbax", NEW.params)
        checkpointer.wait_until_finished()
    shutil.copytree(tmp_path.parent / f"{tmp_path.name}-orbax", tmp_path / "3.orbax-checkpoint-tmp-17")
    assert watch.poll() is None
    (tmp_path / "3.orbax-checkpoint-tmp-17").rename(tmp_path / "3")
    report = watch.poll()
    assert report is not None
    assert report.version == 3
    assert watch.failures == []


def test_one_that_still_changes_is_left_until_it_rests(
    engine: RolloutEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = engine.watch(tmp_path, settle_s=SETTLE_S)
    file = written(tmp_path / "step_1", NEW) / "model.safetensors"

    def writes_meanwhile(seconds: float) -> None:
        assert seconds == SETTLE_S
        file.write_bytes(file.read_bytes())

    with monkeypatch.context() as patch:
        patch.setattr("rollout_spec.weights.watch.time.sleep", writes_meanwhile)
        assert watch.poll() is None
    assert watch.poll() is not None


def test_one_that_changes_while_it_is_read_is_tried_again(
    engine: RolloutEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = engine.watch(tmp_path, settle_s=0.0)
    file = written(tmp_path / "step_1", NEW) / "model.safetensors"
    from rollout_spec.weights import sources

    read = sources.read

    def writes_meanwhile(value: object) -> object:
        file.touch()
        return read(value)

    with monkeypatch.context() as patch:
        patch.setattr(sources, "read", writes_meanwhile)
        assert watch.poll() is None
    assert (engine.weight_version, watch.failures) == (0, [])
    assert watch.poll() is not None
    assert_equal(engine.params, NEW.params)


def test_a_whole_one_that_does_not_fit_is_refused_once_and_the_engine_serves_on(
    engine: RolloutEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = engine.watch(tmp_path, settle_s=SETTLE_S)
    bad = written(tmp_path / "step_5", NEW)
    save_file({"model.norm.weight": np.ones(3, np.float32)}, bad / "model.safetensors")
    watch._next_look = 0
    assert versions(engine) == {0}
    assert [failure.path for failure in watch.failures] == [bad]
    assert isinstance(watch.failures[0].error, WeightUpdateError)
    assert "refused" in caplog.text
    assert watch.poll() is None, "it is not tried again"
    written(bad, NEW)
    assert watch.poll() is not None
    assert engine.weight_version == 5


def test_a_folder_that_is_itself_a_checkpoint(engine: RolloutEngine, tmp_path: Path) -> None:
    watch = engine.watch(tmp_path / "latest", settle_s=SETTLE_S)
    assert watch.poll() is None
    written(tmp_path / "latest", NEW)
    assert watch.poll() is not None
    assert engine.weight_version == 1
    written(tmp_path / "latest", OLD)
    assert watch.poll() is not None
    assert engine.weight_version == 2


def test_running_requests_are_treated_as_the_mode_says(engine: RolloutEngine, tmp_path: Path) -> None:
    engine.watch(tmp_path, mode="inflight", settle_s=SETTLE_S)
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=20, seed=0, ignore_eos=True))
    for _ in range(5):
        engine.step()
    written(tmp_path / "step_4", NEW)
    while not request.ended:
        engine._watch._next_look = 0  # type: ignore[union-attr]
        engine.step()
    assert [version for version, _, _ in request.completions[0].version_spans] == [0, 4]


def test_a_watch_can_be_stopped_and_there_is_one_at_a_time(engine: RolloutEngine, tmp_path: Path) -> None:
    watch = engine.watch(tmp_path, settle_s=SETTLE_S)
    with pytest.raises(EngineStateError, match="stop"):
        engine.watch(tmp_path)
    watch.stop()
    written(tmp_path / "step_1", NEW)
    assert watch.poll() is None
    assert versions(engine) == {0}
    engine.watch(tmp_path, settle_s=SETTLE_S)
    assert versions(engine) == {1}


def test_looking_takes_little_of_the_time(engine: RolloutEngine, tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"step_{number}").mkdir()
    watch = engine.watch(tmp_path)
    looks = 0
    newest = watch._newest

    def counted() -> object:
        nonlocal looks
        looks += 1
        return newest()

    watch._newest = counted  # type: ignore[method-assign, assignment]
    for _ in range(200):
        engine.step()
    assert looks <= 3
