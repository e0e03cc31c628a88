"""What operators do to a running server: pause it, put it to sleep, wake it."""

import concurrent.futures
import gzip
import json
import os
import re
import sys
import time

import pytest
from tests.e2e.conftest import MODEL
from tests.e2e.processes import eventually, run

from drumline.core.model_files import find_model

SOAK = "DRUMLINE_SOAK_SLEEPS" in os.environ
SLEEPS = int(os.environ.get("DRUMLINE_SOAK_SLEEPS", "1"))
STREAMS = 32 if SOAK else 6
MIB = 1 << 20


def resident(server):
    """Return the bytes that the rank has in memory, of files apart."""
    (rank,) = server.ranks()
    memory = rank.memory_info()
    return memory.rss - memory.shared


def complete(http, prompt, **fields):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields
    answer = http.post("/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def stream(http, prompt, **fields):
    """Return the text of a streamed answer."""
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "stream": True} | fields
    text = ""
    with http.stream("POST", "/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


def done(http, path, **fields):
    answer = http.post(path, json=fields, timeout=120)
    assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text


def nothing_is_held(http):
    """Check that the cache can be let go, once the last forward that reads it is over."""
    eventually(lambda: http.post("/flush_cache").json()["success"], 20)


def running(http):
    """Return how many requests the engine says it runs."""
    text = http.get("/metrics").text
    return sum(map(float, re.findall(r"^\S*num_requests_running\S* (\S+)", text, re.MULTILINE)))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux alone")
def test_sleep_gives_weights_and_pages_back_and_the_same_text_comes_after(server, http):
    prompt = "Once upon a time there was a drummer who " + "played and played and " * 25
    text = complete(http, prompt)
    # What computing takes for itself is taken the first times.
    done(http, "/flush_cache")
    assert complete(http, prompt) == text
    awake = resident(server)
    print(f"resident: {awake / MIB:.0f} MiB awake")  # noqa: T201  for whoever measures it
    for n in range(SLEEPS):
        done(http, "/sleep")
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        asleep = resident(server)
        # Of weights alone there are 92 MiB as they are stored, and more as floats.
        assert awake - asleep > 92 * MIB, (awake / MIB, asleep / MIB)
        refused = http.post("/resume")
        assert refused.status_code == 400
        assert "memory is released (weights, kv_cache)" in refused.json()["message"]
        assert http.post("/sleep").json()["message"] == "already released: weights, kv_cache"
        done(http, "/wake_up", tags=["weights"])
        refused = http.post("/wake_up", json={"tags": ["weights"]})
        assert refused.json() == {"success": False, "message": "not released: weights"}
        done(http, "/wake_up")
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert http.get("/is_paused").json() == {"is_paused": False}
        assert complete(http, prompt) == text
        again = resident(server)
        assert again < 1.25 * awake, f"after {n + 1} times"
    print(f"{asleep / MIB:.0f} MiB asleep, {again / MIB:.0f} MiB after {SLEEPS}")  # noqa: T201


def test_sleep_of_level_2_keeps_no_weights_and_serves_again_once_they_are_loaded(server, http):
    prompt = "A drummer who forgot everything"
    text = complete(http, prompt)
    awake = resident(server)
    done(http, "/sleep", level=2)
    if sys.platform == "linux":
        assert awake - resident(server) > 92 * MIB
    done(http, "/wake_up", tags=["weights"])
    refused = http.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
    assert refused.status_code == 503
    assert "the weights were dropped, and none are loaded" in refused.json()["error"]["message"]
    assert http.get("/readiness").status_code == 503
    done(http, "/update_weights_from_disk")
    done(http, "/wake_up", tags=["kv_cache"])
    assert http.get("/readiness").status_code == 200
    assert complete(http, prompt) == text


def test_a_keep_pause_amid_streams_changes_none_of_them(http):
    prompts = [f"The {n}th of all the drummers in the band said that" for n in range(STREAMS)]
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        # Long enough to be met at it.
        long = {"max_tokens": 160, "ignore_eos": True}
        alone = list(pool.map(lambda prompt: complete(http, prompt, **long), prompts))
        asked = [pool.submit(stream, http, prompt, **long) for prompt in prompts]
        eventually(lambda: running(http) > STREAMS // 2, 20)
        done(http, "/pause", mode="keep")
        assert http.get("/is_paused").json() == {"is_paused": True}
        time.sleep(0.3)
        assert not any(one.done() for one in asked)
        assert http.post("/sleep").json()["message"].startswith("paused with mode keep")
        done(http, "/resume")
        assert [one.result() for one in asked] == alone
    nothing_is_held(http)


def test_a_pause_that_waits_under_load_lets_all_of_it_finish_and_nothing_else_begin(http):
    prompts = [f"Of {n} drums in a shop window, the" for n in range(STREAMS)]
    with concurrent.futures.ThreadPoolExecutor(2 * STREAMS + 1) as pool:
        long = {"max_tokens": 80, "ignore_eos": True}
        alone = list(pool.map(lambda prompt: complete(http, prompt, **long), prompts))
        asked = [pool.submit(stream, http, prompt, **long) for prompt in prompts]
        eventually(lambda: running(http) > STREAMS // 2, 20)
        paused = pool.submit(done, http, "/pause", mode="wait")
        eventually(lambda: http.get("/is_paused").json()["is_paused"], 20)
        late = [pool.submit(stream, http, prompt, **long) for prompt in prompts]
        paused.result()
        assert [one.result() for one in asked] == alone
        # What came before the pause is whole; whoever came after it has not begun.
        state = http.get("/get_internal_state").json()["internal_states"][0]
        assert (state["standing"], state["in_flight"], state["waiting"]) == ("paused", 0, 0)
        eventually(lambda: running(http) == STREAMS, 20)
        assert not any(one.done() for one in late)
        done(http, "/resume")
        assert [one.result() for one in late] == alone
    nothing_is_held(http)


def test_a_pause_that_ends_what_runs_tells_the_clients_and_a_waiting_one_lets_it_finish(http):
    def ask(tokens):
        body = {"model": MODEL, "prompt": "Drums and", "max_tokens": tokens, "ignore_eos": True}
        return http.post("/v1/completions", json=body, timeout=60)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        ended = pool.submit(ask, 1500)
        eventually(lambda: running(http), 20)
        done(http, "/pause_generation", mode="abort")
        assert ended.result().status_code == 503
        assert "the engine was paused" in ended.result().json()["error"]["message"]
        done(http, "/continue_generation")
        first = pool.submit(ask, 60)
        eventually(lambda: running(http), 20)
        done(http, "/pause_generation")
        assert first.result().status_code == 200
        withheld = pool.submit(ask, 2)
        time.sleep(0.3)
        assert not withheld.done()
        done(http, "/resume")
        assert withheld.result().status_code == 200


def test_weights_from_disk_take_the_place_of_those_that_serve(http, tiny_model):
    prompt = "The best of all drummers is"
    text = complete(http, prompt)
    began = time.perf_counter()
    path = str(find_model(None).path)
    done(http, "/update_weights_from_disk", model_path=path, weight_version="step-1")
    print(f"the embedded model was loaded in {time.perf_counter() - began:.1f} s")  # noqa: T201
    assert http.get("/get_weight_version").json() == {"weight_version": "step-1"}
    assert complete(http, prompt) == text
    for other, reason in (
        (str(tiny_model), "vocab_size is 512 there, and 49152 in what is served"),
        ("/nowhere", "'/nowhere' is no existing directory or file"),
    ):
        refused = http.post("/update_weights_from_disk", json={"model_path": other})
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        assert reason in refused.json()["message"]
    assert http.get("/is_paused").json() == {"is_paused": False}
    assert http.get("/get_weight_version").json() == {"weight_version": "step-1"}
    assert complete(http, prompt) == text


def test_a_profile_has_the_forwards_in_the_order_in_which_they_were_dispatched(http, tmp_path):
    prompt = "Nobody plays the drums like"
    text = complete(http, prompt)
    started = http.post("/start_profile", json={"num_steps": 4, "output_dir": str(tmp_path)})
    assert (started.status_code, started.json()["success"]) == (200, True)
    again = http.post("/start_profile").json()["message"]
    assert again == "a profile is already in progress; call stop_profile first"
    assert complete(http, prompt) == text
    stopped = http.post("/stop_profile", timeout=120)
    assert (stopped.status_code, stopped.json()["success"]) == (200, True)
    assert f"4 forwards, in {tmp_path}/" in stopped.json()["message"]
    refused = http.post("/stop_profile")
    assert refused.status_code == 400
    assert "no profile is in progress" in refused.json()["message"]
    merged = tmp_path / "merged.json.gz"
    done = run("profile", "merge", str(tmp_path), "--output", str(merged))
    assert done.status == 0, done
    assert re.search(r"^ *TP0 +4 ", done.out, re.MULTILINE), done.out
    events = json.loads(gzip.decompress(merged.read_bytes()))["traceEvents"]
    dispatched = {e["args"]["round"]: e for e in events
                  if e["name"] == "dispatch" and "rows" in e["args"]}  # fmt: skip
    forwards = {int(e["name"].split(":")[0].split()[1]): e for e in events
                if e["name"].startswith("forward ")}  # fmt: skip
    assert len(forwards) == 4
    for round_, forward in forwards.items():
        assert dispatched[round_]["ts"] <= forward["ts"]
    assert len([e for e in events if e.get("cat") == "ac2g"]) == 8
    outside = http.post("/start_profile", json={"output_dir": "/etc"})
    assert outside.status_code == 400
    assert "output_dir '/etc' is outside of" in outside.json()["message"]


def test_health_tells_the_round_that_the_engine_is_in(http):
    first, second = (http.get("/health").json() for _ in range(2))
    assert (first["status"], len(first["rounds"])) == ("ok", 1)
    eventually(lambda: http.get("/health").json()["rounds"] > second["rounds"])
    state = http.get("/get_internal_state").json()["internal_states"][0]
    assert state["round"] >= second["rounds"][0] >= first["rounds"][0] > 0
    assert state["standing"] == "serving"


def test_a_server_asleep_uses_next_to_nothing(server, http):
    done(http, "/pause", mode="keep")
    (rank,) = server.ranks()
    before, began = sum(rank.cpu_times()[:2]), time.perf_counter()
    time.sleep(4)
    used = (sum(rank.cpu_times()[:2]) - before) / (time.perf_counter() - began)
    done(http, "/resume")
    print(f"a frozen rank takes {used:.1%} of a core")  # noqa: T201  for whoever measures it
    assert used <= (0.03 if SOAK else 0.06)
