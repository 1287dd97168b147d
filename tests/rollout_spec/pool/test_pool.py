"""A pool generates what one engine does, whatever the number of engines, and its verbs work."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import ray
from ray.util import placement_group_table
from ray.util.placement_group import placement_group, remove_placement_group
from safetensors.numpy import save_file

from rollout_spec import RolloutPool, SamplingParams
from rollout_spec.errors import ConfigError, EngineStateError, PromptError, WeightUpdateError
from rollout_spec.pool.weights import DeviceWeights
from rollout_spec.weights import to_hf
from tests.helpers.tiny_models import tiny_model
from tests.rollout_spec.pool import pools

pytestmark = pytest.mark.usefixtures("ray_on_2_cpus")


@pytest.fixture(scope="module")
def pool() -> Iterator[RolloutPool]:
    with pools.new_pool(2) as made:
        yield made


@pytest.fixture(scope="module")
def other_params() -> dict:
    return tiny_model("llama", 7).params


def test_tokens_are_those_of_one_engine(pool: RolloutPool) -> None:
    prompts, sampling = pools.requests()
    outputs = pool.generate(prompts, sampling)
    pools.assert_same(outputs, pools.expected(prompts, sampling))
    assert [output.index for output in outputs] == list(range(len(prompts)))
    assert all(stats.steps for stats in pool.stats().engines.values())


def test_three_engines_drafting_generate_the_same() -> None:
    prompts, sampling = pools.requests()
    with pools.new_pool(3, pools.CONFIG, history_every_s=0.1) as three:
        pools.assert_same(three.generate(prompts, sampling), pools.expected(prompts, sampling))
        pools.assert_same(three.generate(prompts, sampling), pools.expected(prompts, sampling))


def test_seeds_that_are_drawn_are_those_one_engine_draws() -> None:
    prompts, _ = pools.requests(6)
    free = SamplingParams(max_tokens=6, n=2)
    from rollout_spec import RolloutEngine

    wanted = RolloutEngine(pools.model().config, pools.model().params, config=pools.PLAIN).generate(
        prompts, free
    )
    with pools.new_pool(1) as one:
        pools.assert_same(one.generate(prompts, free), wanted)


def test_stream_yields_each_prompt_once(pool: RolloutPool) -> None:
    prompts, sampling = pools.requests()
    outputs = list(pool.stream(prompts, sampling))
    pools.assert_same(sorted(outputs, key=lambda output: output.index), pools.expected(prompts, sampling))


def test_closing_a_stream_aborts_the_rest(pool: RolloutPool) -> None:
    prompts, sampling = pools.requests()
    stream = pool.stream(prompts, sampling)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    pools.wait_until(lambda: pool.stats().running + pool.stats().waiting == 0)


def test_asyncio(pool: RolloutPool) -> None:
    prompts, sampling = pools.requests()

    async def run() -> list:
        one = pool.submit(prompts[0], sampling[0])
        outputs = await pool.generate_async(prompts, sampling)
        return [await one, *outputs]

    first, *outputs = asyncio.run(run())
    wanted = pools.expected(prompts, sampling)
    pools.assert_same(outputs, wanted)
    pools.assert_same([first], wanted[:1])


def test_a_generator_is_read_only_so_far_as_there_is_use_for_it(pool: RolloutPool) -> None:
    taken = itertools.count()

    def prompts() -> Iterator[list[int]]:
        while True:
            next(taken)
            yield [5, 6]

    stream = pool.stream(prompts(), SamplingParams(max_tokens=2, seed=0))
    for _ in range(5):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert next(taken) <= 5 + 4 * 4 * 2


def test_faulty_prompts_and_values_are_refused_before_anything_runs(pool: RolloutPool) -> None:
    pools.wait_until(lambda: pool.stats().running + pool.stats().waiting == 0)
    finished = pool.stats().requests_finished
    with pytest.raises(PromptError):
        pool.generate([[1, 2], [999]])
    with pytest.raises(PromptError):
        pool.generate("text")
    with pytest.raises(ConfigError):
        pool.generate([[1]], [SamplingParams(), SamplingParams()])
    with pytest.raises(ConfigError):
        pool.scale(0)
    with pytest.raises(ConfigError):
        pool.update_weights({}, mode="now")  # type: ignore[arg-type]
    assert pool.stats().requests_finished == finished


def test_abort_ends_requests_with_what_they_have(pool: RolloutPool) -> None:
    endless = SamplingParams(max_tokens=70, seed=1, ignore_eos=True, n=3)
    requests = [pool.submit([4, 5, index], endless, request_id=("mine", index)) for index in range(6)]
    pool.abort([("mine", 5)])
    assert requests[5].result(60).completions[0].finish_reason in ("abort", "length")
    pool.abort()
    for request in requests:
        for completion in request.result(60).completions:
            pools.assert_whole(completion)


def test_pause_and_sleep_keep_requests(pool: RolloutPool) -> None:
    prompts, sampling = pools.requests()
    pool.pause()
    requests = [pool.submit(prompt, one) for prompt, one in zip(prompts, sampling, strict=True)]
    pool.resume()
    pool.sleep()
    pool.wake_up()
    pools.assert_same([request.result(60) for request in requests], pools.expected(prompts, sampling))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["drain", "interrupt", "inflight", "inflight_keep"])
def test_an_update_while_streaming(pool: RolloutPool, other_params: dict, mode: str, overlap: bool) -> None:
    prompts, sampling = pools.requests(16, tokens=60)
    before = pool.weight_version
    stream = pool.stream(prompts, sampling)
    outputs = [next(stream)]
    objects = pool.stats().weight_objects
    report = pool.update_weights(other_params, mode=mode, overlap=overlap)  # type: ignore[arg-type]
    assert pool.stats().weight_objects == objects + 1
    assert (report.version, report.previous_version) == (before + 1, before)
    assert len(report.engines) == 2
    assert set(pool.weight_versions.values()) == {before + 1}
    outputs += list(stream)
    assert sorted(output.index for output in outputs) == list(range(len(prompts)))
    for output in outputs:
        for completion in output.completions:
            pools.assert_whole(completion)
            versions = completion.weight_versions.tolist()
            assert versions == sorted(versions)
            assert set(versions) <= {before, before + 1}
            if mode in ("drain", "interrupt"):
                assert len(set(versions)) <= 1
    pool.update_weights(pools.model().params)
    pools.assert_same(pool.generate(prompts, sampling), pools.expected(prompts, sampling))


def test_a_bad_update_is_refused_everywhere(pool: RolloutPool) -> None:
    version = pool.weight_version
    with pytest.raises(WeightUpdateError):
        pool.update_weights({"norm": {"scale": np.zeros(3, np.float32)}})
    assert pool.weight_version == version
    assert set(pool.weight_versions.values()) == {version}
    prompts, sampling = pools.requests(4)
    pools.assert_same(pool.generate(prompts, sampling), pools.expected(prompts, sampling))


@pytest.mark.parametrize("way", ["chunks", "devices"])
def test_other_ways_for_weights(pool: RolloutPool, other_params: dict, way: str) -> None:
    prompts, sampling = pools.requests(4)
    with_other = pools.new_engine_outputs(other_params, prompts, sampling)
    if way == "chunks":
        pool.update_weights(other_params, chunk_bytes=1000)
    else:
        pool.update_weights(DeviceWeights(jax.device_put(other_params)))
    pools.assert_same(pool.generate(prompts, sampling), with_other)
    pool.update_weights(pools.model().params)


def test_an_update_from_a_folder(pool: RolloutPool, other_params: dict, tmp_path: Path) -> None:
    save_file(
        {name: np.asarray(array) for name, array in to_hf(pools.model().config, other_params)},
        tmp_path / "model.safetensors",
    )
    prompts, sampling = pools.requests(4)
    pool.update_weights(tmp_path)
    pools.assert_same(
        pool.generate(prompts, sampling), pools.new_engine_outputs(other_params, prompts, sampling)
    )
    pool.update_weights(pools.model().params)


def test_a_version_is_one_object_however_many_engines_and_old_ones_go(
    other_params: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, made = ray.put, []

    def counted(value: Any, **options: Any) -> Any:
        reference = put(value, **options)
        made.append(reference.hex())
        return reference

    with pools.new_pool(3, share_history=False) as pool:
        monkeypatch.setattr(ray, "put", counted)
        for version, weights in enumerate((other_params, pools.model().params, other_params), 1):
            pool.update_weights(weights)
            assert len(made) == version, "one object a version, whatever the number of engines"
            pools.wait_until(lambda: not _in_the_store() & set(made[:-1]))
    pools.wait_until(lambda: not _in_the_store() & set(made))


def _in_the_store() -> set[str]:
    """Objects that this process still refers to."""
    return set(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def test_engines_take_the_bundles_of_a_placement_group_that_is_there() -> None:
    group = placement_group([{"CPU": 0.2}, {"CPU": 0.05}, {"CPU": 0.2}])
    assert group.wait(60)
    try:
        with pools.new_pool(2, placement_group=group) as pool:
            pools.assert_same(pool.generate(*pools.requests(4)), pools.expected(*pools.requests(4)))
            assert placement_group_table(group)["state"] == "CREATED"
            with pytest.raises(ConfigError, match="no free bundle"):
                pool.scale(3)
            pools.assert_same(pool.generate(*pools.requests(4)), pools.expected(*pools.requests(4)))
        assert placement_group_table(group)["state"] == "CREATED", "the caller's group is the caller's"
    finally:
        remove_placement_group(group)


def test_an_update_while_asleep(pool: RolloutPool, other_params: dict) -> None:
    prompts, sampling = pools.requests(4)
    pool.sleep()
    pool.update_weights(other_params)
    pool.wake_up()
    pools.assert_same(
        pool.generate(prompts, sampling), pools.new_engine_outputs(other_params, prompts, sampling)
    )
    pool.update_weights(pools.model().params)


def test_weights_that_are_no_weights(pool: RolloutPool) -> None:
    for weights in (5, [1, 2], {"layers": [np.zeros(2)]}):
        with pytest.raises(WeightUpdateError):
            pool.update_weights(weights)


def test_over_provisioning_carries_what_is_unfinished(pool: RolloutPool) -> None:
    prompts, _ = pools.requests(12)
    sampling = [
        SamplingParams(n=2, seed=index, max_tokens=4 + 5 * index, ignore_eos=True) for index in range(12)
    ]
    wanted = {tuple(map(tuple, tokens)) for tokens in pools.all_tokens(pools.expected(prompts, sampling))}
    done, partial = pool.generate_enough(prompts, sampling, enough=6)
    assert len(done) >= 6
    assert len(done) + len(partial) == 12
    pool.update_weights(pools.model().params)
    more, none = pool.generate_enough([], [], enough=12, carried=partial)
    assert none == []
    assert {tuple(map(tuple, tokens)) for tokens in pools.all_tokens([*done, *more])} == wanted
    for output, before in zip(more, partial, strict=True):
        for completion, start in zip(output.completions, before.completions, strict=True):
            count = len(start.token_ids)
            np.testing.assert_array_equal(completion.logprobs[:count], start.logprobs)
            np.testing.assert_array_equal(completion.weight_versions[:count], start.weight_versions)


def test_scaling_while_it_runs() -> None:
    prompts, sampling = pools.requests(24, tokens=70)
    with pools.new_pool(1) as growing:
        stream = growing.stream(prompts, sampling)
        outputs = [next(stream)]
        growing.scale(3)
        assert growing.num_engines == 3
        outputs.append(next(stream))
        growing.scale(1)
        outputs += list(stream)
        pools.assert_same(sorted(outputs, key=lambda output: output.index), pools.expected(prompts, sampling))
        assert growing.num_engines == 1


def test_engines_get_the_resources_they_ask_for() -> None:
    with pools.new_pool(2, resources_per_engine={"CPU": 0.1, "TPU": 2}, placement="spread") as chips:
        assert len(chips.generate([[4]], SamplingParams(max_tokens=1))) == 1
    with pytest.raises(ConfigError):
        pools.new_pool(2, placement="near")


def test_a_pool_that_is_shut_down_says_so() -> None:
    made = pools.new_pool(1)
    made.shutdown()
    with pytest.raises(EngineStateError):
        made.generate([[1]])
