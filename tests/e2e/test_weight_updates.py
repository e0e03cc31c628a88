"""Weights that change while an engine of two ranks serves: from disk, tensors and a trainer."""

import concurrent.futures
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch
from tests.e2e.processes import Server, eventually
from tests.unit.device.trainer import free_port

PROMPTS = [[7 * n + 1, 5, 6, 7 + n] * 5 for n in range(8)]
TOKENS = 16
SOAK = "DRUMLINE_SOAK_SWAPS" in os.environ
SWAPS = int(os.environ.get("DRUMLINE_SOAK_SWAPS", "1"))
NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.2.self_attn.q_proj.weight"
BYTES = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def checkpoints(tiny_model, tmp_path_factory):
    """Return two checkpoints of one shape: the one that is served first, and another."""
    other = tmp_path_factory.mktemp("other")
    for file in tiny_model.iterdir():
        shutil.copy(file, other)
    generator = torch.Generator().manual_seed(23)
    tensors = {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in stored(tiny_model).items()
    }
    safetensors.torch.save_file(tensors, other / "model.safetensors", {"format": "pt"})
    return {"a": tiny_model, "b": other}


def stored(directory):
    return safetensors.torch.load_file(Path(directory) / "model.safetensors")


@pytest.fixture(scope="module", params=["tensor", *(["pipeline"] if SOAK else [])])
def server(checkpoints, request):
    # With one way to compute a row in any batch, an answer is one of the two, or of neither.
    server = Server(
        *("--model", str(checkpoints["a"]), "--dtype", "float32", "--max-total-tokens", "4096"),
        *(f"--{request.param}-parallel-size", "2", "--deterministic", "--weight-version", "a"),
        *("--weight-update-timeout", "5"),
    )
    try:
        yield server.wait_ready()
        server.signal()
        assert server.wait() == 0, server.said
    finally:
        server.close()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(http, prompt):
    """Return an answer's version and ids."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = http.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["meta_info"]["weight_version"], tuple(told["output_ids"])


def done(http, path, **fields):
    answer = http.post(path, json=fields)
    assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text


def refused(http, path, **fields):
    answer = http.post(path, json=fields)
    assert (answer.status_code, answer.json()["success"]) == (400, False), answer.text
    return answer.json()["message"]


@pytest.fixture(scope="module")
def answers(server, checkpoints):
    """Return what each checkpoint answers to each prompt; the first one serves afterwards."""
    found = {}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for version in ("b", "a"):
            path = str(checkpoints[version])
            done(http, "/update_weights_from_disk", model_path=path, weight_version=version)
            told = [ask(http, prompt) for prompt in PROMPTS]
            assert {version} == {each for each, _ in told}
            found[version] = [ids for _, ids in told]
    assert not set(found["a"]) & set(found["b"])
    return found


def serves(http, answers, version):
    """Hold an engine to the answers of a checkpoint, whatever it calls its weights."""
    assert [ask(http, prompt)[1] for prompt in PROMPTS] == answers[version]


def test_no_answer_mixes_two_checkpoints_that_are_swapped_under_load(
    server, http, checkpoints, answers
):
    over = threading.Event()

    def client(nth):
        with httpx.Client(base_url=server.url, timeout=60) as own:
            told, n = [], nth
            while not over.is_set():
                n = (n + 1) % len(PROMPTS)
                told.append((n, *ask(own, PROMPTS[n])))
            return told

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(client, nth) for nth in range(6)]
        try:
            for version in "b" + "ab" * SWAPS:
                time.sleep(0.3)
                path = str(checkpoints[version])
                done(http, "/update_weights_from_disk", model_path=path, weight_version=version)
            body = safetensors.torch.save(stored(checkpoints["a"]))
            path = "/update_weights_from_tensor?weight_version=a"
            assert http.post(path, content=body, headers=BYTES).status_code == 200
            time.sleep(0.3)
        finally:
            over.set()
    told = [each for one in asking for each in one.result()]
    for prompt, version, ids in told:
        assert ids == answers[version][prompt], (prompt, version)
    versions = [sum(version == each for _, each, _ in told) for version in "ab"]
    assert min(versions) >= len(PROMPTS), versions


def test_some_weights_come_by_themselves_and_each_is_told_whole(http, checkpoints, answers):
    old, new = stored(checkpoints["a"]), stored(checkpoints["b"])
    some = {name: new[name] for name in (NORM, DOWN, QUERY)}
    answer = http.post(
        "/update_weights_from_tensor", content=safetensors.torch.save(some), headers=BYTES
    )
    assert answer.status_code == 200, answer.text
    for name, tensor in (old | some).items():
        told = http.get("/get_weights_by_name", params={"name": name, "truncate_size": 20}).json()
        assert torch.equal(torch.tensor(told), tensor[:20]), name
    assert not {ids for _, ids in (ask(http, p) for p in PROMPTS)} & {*answers["a"], *answers["b"]}
    # A refusal of one of the two ranks, or of both, changes nothing.
    for tensors, reason in (
        ({NORM: old[NORM], "model.norm.bias": old[NORM].clone()}, "no weight here is called"),
        (
            {NORM: old[NORM], DOWN: old[DOWN][:, 1:].clone()},
            f"{DOWN} has shape [144, 159]; here it is",
        ),
    ):
        body = safetensors.torch.save(tensors)
        answer = http.post("/update_weights_from_tensor", content=body, headers=BYTES)
        assert answer.status_code == 400
        assert reason in answer.json()["message"]
    pickled = http.post("/update_weights_from_tensor", content=b"\x80\x04.", headers=BYTES)
    assert "a pickle can run any code" in pickled.json()["message"]
    answer = http.get("/get_weights_by_name", params={"name": NORM, "truncate_size": 144})
    assert torch.equal(torch.tensor(answer.json()), new[NORM])
    done(http, "/update_weights_from_disk", model_path=str(checkpoints["a"]))
    serves(http, answers, "a")


class Trainer:
    """A trainer's process."""

    def __init__(self, checkpoint, most=()):
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "trainer.py"), str(self.port), "3",
             str(checkpoint), *map(str, most)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def says(self, word):
        assert self.process.stdout.readline().strip() == word

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def close(self):
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def trainers():
    made = []

    def make(*args):
        made.append(Trainer(*args))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def sent_by(checkpoint):
    tensors = stored(checkpoint)
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def joined(http, trainer):
    trainer.says("here")
    done(
        http, "/init_weights_update_group", master_address="127.0.0.1", master_port=trainer.port,
        rank_offset=1, world_size=3, backend="gloo",
    )  # fmt: skip
    trainer.says("met")


def test_a_trainer_in_another_process_pushes_weights_to_both_ranks(
    http, checkpoints, answers, trainers
):
    trainer = trainers(checkpoints["b"])
    joined(http, trainer)
    trainer.go()
    began = time.perf_counter()
    sent = sent_by(checkpoints["b"])
    done(http, "/update_weights_from_distributed", **sent, weight_version="pushed")
    print(f"pushed in {time.perf_counter() - began:.2f} s")  # noqa: T201  for whoever measures it
    trainer.says("sent")
    serves(http, answers, "b")
    assert http.get("/get_weight_version").json() == {"weight_version": "pushed"}
    assert ask(http, PROMPTS[0])[0] == "pushed"
    info = http.get("/server_info").json()
    assert info["weight_version"] == "pushed"
    done(http, "/destroy_weights_update_group")
    done(http, "/destroy_weights_update_group")
    assert "there is no group" in refused(http, "/update_weights_from_distributed", **sent)
    done(http, "/update_weights_from_disk", model_path=str(checkpoints["a"]), weight_version="a")


def test_a_trainer_that_dies_is_named_and_the_engine_serves_on(
    http, checkpoints, answers, trainers
):
    trainer = trainers(checkpoints["b"], (5,))
    joined(http, trainer)
    trainer.go()
    sent = sent_by(checkpoints["b"])
    message = refused(http, "/update_weights_from_distributed", **sent, weight_version="half")
    assert f"{sent['names'][5]}, 6 of " in message
    assert "did not come, and group weight_update_group is over" in message
    serves(http, answers, "a")
    assert http.get("/get_weight_version").json() == {"weight_version": "a"}
    asked = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1}
    message = refused(http, "/init_weights_update_group", **asked, world_size=2, backend="gloo")
    assert "no room for this engine's 2 ranks" in message
    message = refused(http, "/init_weights_update_group", **asked, world_size=3)
    assert "backend nccl is not for weights in host memory" in message


@pytest.mark.skipif(not SOAK, reason="waits for nobody; tests of the device do so with one rank")
def test_a_trainer_that_never_comes_is_waited_for_only_so_long(http, answers):
    port = free_port()
    asked = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
    began = time.perf_counter()
    message = refused(http, "/init_weights_update_group", **asked, world_size=3, backend="gloo")
    assert f"did not meet at 127.0.0.1:{port} within 5 s" in message
    assert time.perf_counter() - began < 15
    serves(http, answers, "a")


@pytest.mark.skipif(not SOAK, reason="one more server; what it proves is simulated as well")
def test_discarded_weights_without_others_are_said_to_be_lost(checkpoints, tmp_path):
    for file in checkpoints["b"].iterdir():
        shutil.copy(file, tmp_path)
    tensors = stored(checkpoints["b"])
    del tensors[NORM]  # of which nothing is known before it is read
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    server = Server(
        *("--model", str(checkpoints["a"]), "--dtype", "float32", "--max-total-tokens", "4096"),
        *("--weight-update-policy", "discard"),
    )
    try:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=60) as http:
            before = ask(http, PROMPTS[0])
            assert before[0] == "default"
            done(http, "/update_weights_from_disk", model_path=str(checkpoints["a"]))
            assert ask(http, PROMPTS[0]) == before
            message = refused(http, "/update_weights_from_disk", model_path=str(tmp_path))
            assert f"lacks the tensor {NORM}" in message
            assert "the engine must be started again" in message
            body = {"input_ids": PROMPTS[0]}
            answer = http.post("/generate", json=body)
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, message)
            health = http.get("/health")
            assert (health.status_code, health.json()["reason"]) == (503, message)
            good = str(checkpoints["a"])
            # A pause for that is refused as well: nothing runs any more.
            assert refused(http, "/update_weights_from_disk", model_path=good) == message
            assert refused(http, "/resume") == message
        eventually(lambda: any("could not be loaded" in line for line in server.lines))
        server.signal()
        assert server.wait() == 0, server.said
    finally:
        server.close()
