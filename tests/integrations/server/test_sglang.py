"""SGLang's endpoints: the tokens of an engine, log-probabilities, streams, weights, pausing and aborting."""

from __future__ import annotations

import base64
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from rollout_spec.weights import to_hf
from tests.integrations.server import servers
from tests.integrations.server.servers import Running, expected

IDS = [11, 12, 13, 14]
SAMPLING = {"max_new_tokens": 12, "temperature": 0.8, "sampling_seed": 5, "top_p": 0.9, "ignore_eos": True}
SAME = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "top_p": 0.9, "ignore_eos": True}


def test_tokens_and_logprobs_are_the_engines(running: Running) -> None:
    wanted = expected(IDS, **SAME)
    got = running.post("/generate", input_ids=IDS, sampling_params=SAMPLING, return_logprob=True).json()
    assert got["output_ids"] == wanted.token_ids.tolist()
    assert got["text"] == wanted.text
    meta = got["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 12)
    assert [row[1] for row in meta["output_token_logprobs"]] == got["output_ids"]
    given = [row[0] for row in meta["output_token_logprobs"]]
    np.testing.assert_allclose(given, wanted.sampled_logprobs + np.log(wanted.kept_mass), atol=1e-5)
    np.testing.assert_allclose(meta["model_logprobs"], wanted.logprobs, atol=1e-5)


def test_a_batch_is_answered_in_its_order_with_samples_side_by_side(running: Running) -> None:
    prompts = [[11, 12], [13], [11, 12]]
    sampling = [{**SAMPLING, "n": 2, "sampling_seed": seed} for seed in (1, 2, 3)]
    got = running.post("/generate", input_ids=prompts, sampling_params=sampling, rid=["a", "b", "c"]).json()
    assert [one["meta_info"]["id"] for one in got] == ["a", "a", "b", "b", "c", "c"]
    for index, prompt in enumerate(prompts):
        wanted = expected(prompt, **{**SAME, "seed": index + 1, "n": 2})
        assert got[2 * index]["output_ids"] == wanted.token_ids.tolist()


def test_a_stream_ends_with_what_the_whole_answer_says(running: Running) -> None:
    whole = running.post("/generate", text="abc", sampling_params=SAMPLING).json()
    with running.client.stream(
        "POST", "/generate", json={"text": "abc", "sampling_params": SAMPLING, "stream": True}
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["text"] == whole["text"]
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2, "tokens come as they are made"


def test_stop_strings_and_tokens_are_named(running: Running) -> None:
    wanted = expected(IDS, **SAME)
    token = int(wanted.token_ids[3])
    got = running.post(
        "/generate", input_ids=IDS, sampling_params={**SAMPLING, "stop_token_ids": [token]}
    ).json()
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "one entry a prompt"),
        ({"input_ids": [[1], [2]], "stream": True}, "only one prompt"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"mirostat": 1}}, "mirostat"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"input_ids": [10**7]}, "vocabulary"),
        ({"input_ids": []}, "prompt"),
        ({"input_ids": [1] * 200}, "maximum length"),
    ],
)
def test_what_can_not_be_run_is_refused_by_name(running: Running, body: dict, named: str) -> None:
    answer = running.post("/generate", **body)
    assert answer.status_code in (400, 422)
    assert named in answer.text


def test_weights_come_from_disk_and_from_tensors_and_every_token_says_whose_it_is(
    running: Running, weights_dir: Path
) -> None:
    before = running.client.get("/get_weight_version").json()["weight_version"]
    first = running.post("/generate", input_ids=IDS, sampling_params=SAMPLING).json()
    answer = running.post(
        "/update_weights_from_disk", model_path=str(weights_dir / "other"), weight_version=77
    )
    assert answer.json()["success"] is True
    second = running.post("/generate", input_ids=IDS, sampling_params=SAMPLING).json()
    assert second["meta_info"]["weight_versions"] == [77] * 12
    assert second["meta_info"]["weight_version"] == "77" != before
    assert second["output_ids"] != first["output_ids"]
    arrays = {
        name: np.ascontiguousarray(array)
        for name, array in to_hf(servers.model().config, servers.model().params)
    }
    half = len(arrays) // 2
    files = [dict(list(arrays.items())[:half]), dict(list(arrays.items())[half:])]
    serialized = [base64.b64encode(save(file)).decode() for file in files]
    assert running.post("/update_weights_from_tensor", serialized_named_tensors=serialized).json()["success"]
    assert (
        running.post("/generate", input_ids=IDS, sampling_params=SAMPLING).json()["output_ids"]
        == first["output_ids"]
    )


def test_bad_weights_are_refused_whole(running: Running, weights_dir: Path) -> None:
    version = running.client.get("/get_weight_version").json()
    outside = running.post("/update_weights_from_disk", model_path=str(weights_dir.parent))
    assert outside.status_code == 400
    assert "below these folders" in outside.text
    climbing = running.post("/update_weights_from_disk", model_path=f"{weights_dir}/first/../../..")
    assert climbing.status_code == 400
    (weights_dir / "link").symlink_to("/tmp") if not (weights_dir / "link").exists() else None
    assert running.post("/update_weights_from_disk", model_path=f"{weights_dir}/link").status_code == 400
    lacking = base64.b64encode(save({"model.norm.weight": np.zeros(3, np.float32)})).decode()
    for tensors, named in (([lacking], "missing"), (["!!"], "base64"), (["AAAA"], "safetensors")):
        answer = running.post("/update_weights_from_tensor", serialized_named_tensors=tensors)
        assert answer.status_code == 400
        assert named in answer.text
    assert running.client.get("/get_weight_version").json() == version


def test_pausing_holds_requests_and_aborting_ends_them_with_what_they_have(running: Running) -> None:
    running.post("/pause_generation")
    answers = []

    def ask() -> None:
        answers.append(running.post("/generate", input_ids=IDS, rid="held", sampling_params=SAMPLING).json())

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    assert answers == []
    assert running.client.get("/status").json()["paused"] is True
    running.post("/continue_generation")
    asking.join()
    assert answers[0]["output_ids"] == expected(IDS, **SAME).token_ids.tolist()
    running.post("/pause_generation")
    asking = threading.Thread(target=ask)
    asking.start()
    while not running.post("/abort_request", rid="held").json()["aborted"]:
        time.sleep(0.02)
    asking.join()
    running.post("/continue_generation")
    assert answers[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert running.post("/abort_request").status_code == 400
    assert running.post("/abort_request", abort_all=True).json()["aborted"] == 0


def test_the_rest_answers(running: Running) -> None:
    assert running.client.get("/health").json() == {"status": "ok"}
    assert running.client.get("/health_generate").status_code == 200
    info = running.client.get("/get_model_info").json()
    assert info["vocab_size"] == servers.model().config.vocab_size
    assert running.post("/flush_cache").json() == {"success": True}
    text = running.client.get("/metrics").text
    assert "rollout_spec_generated_tokens_total" in text
    assert "rollout_spec_weight_version" in text
    assert "<title>rollout_spec</title>" in running.client.get("/").text
