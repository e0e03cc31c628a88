"""What operators' routes are given that no field can be: 400 by name, and no engine is asked."""

import json
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from msgspec import Meta, Struct
from tests.fakes.http import run, served
from tests.fakes.workers import served_by_workers

from drumline.frontend.control_routes import control_routes
from drumline.frontend.operation import Operation

HUGE = [1 << 63, -(1 << 63), 10**30]
NO_NUMBER = [*HUGE, -1, True, 1.5, "x", "nan", "inf", [], {}, 1e400]
NO_WORD = [3, True, [], {}, 1.5]
NO_SWITCH = ["maybe", 2, -1, [], {}, 1.5, None]
SENT = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
JOIN = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}

FIELDS = [
    # path, what else must be given, field, what it cannot be
    ("/start_profile", {}, "start_step", NO_NUMBER),
    ("/start_profile", {}, "num_steps", [*NO_NUMBER, 0]),
    ("/start_profile", {}, "output_dir", [*NO_WORD, ""]),
    ("/start_profile", {}, "profile_id", [*NO_WORD, "", "../x", "a" * 65]),
    ("/start_profile", {}, "activities", [3, "CPU", [], [3], {}]),
    ("/start_profile", {}, "profile_by_stage", NO_SWITCH),
    ("/start_profile", {}, "with_stack", NO_SWITCH[:-1]),
    ("/start_profile", {}, "record_shapes", NO_SWITCH[:-1]),
    ("/flush_cache", {}, "timeout", [*HUGE, -1, -0.5, 601, True, "x", "nan", "inf", [], None]),
    ("/reset_prefix_cache", {}, "reset_external", NO_SWITCH),
    ("/pause", {}, "mode", NO_WORD),
    ("/pause", {}, "clear_cache", NO_SWITCH[:-1]),
    ("/pause_generation", {}, "wait_for_inflight_requests", NO_SWITCH[:-1]),
    ("/resume", {}, "torch_empty_cache", NO_SWITCH),
    ("/sleep", {}, "level", [*NO_NUMBER, 0, 3]),
    ("/sleep", {}, "mode", [*NO_WORD, "keep"]),
    ("/sleep", {}, "tags", [3, "weights", [3], {}]),
    ("/wake_up", {}, "tags", [3, "weights", [3], {}]),
    ("/set_internal_state", {}, "server_args", [3, "x", [], None, True]),
    ("/update_weights_from_disk", {}, "model_path", NO_WORD),
    ("/update_weights_from_disk", {}, "load_format", NO_WORD),
    ("/update_weights_from_disk", {}, "weight_version", NO_WORD),
    ("/update_weights_from_disk", {}, "flush_cache", NO_SWITCH),
    ("/update_weights_from_disk", {}, "abort_all_requests", NO_SWITCH),
    ("/update_weights_from_disk", {}, "keep_pause", NO_SWITCH),
    ("/update_weights_from_disk", {}, "token_step", NO_NUMBER),
    ("/update_weights_from_tensor", {}, "serialized_named_tensors", [3, "x", [3], ["?"], {}]),
    ("/update_weights_from_distributed", SENT, "names", [3, "a", [3], {}]),
    ("/update_weights_from_distributed", SENT, "dtypes", [3, "a", [3], {}]),
    ("/update_weights_from_distributed", SENT, "shapes", [3, [3], [["x"]], [[True]], {}]),
    ("/update_weights_from_distributed", SENT, "shapes", [[[each]] for each in [*HUGE, -1, 1.5]]),
    ("/update_weights_from_distributed", SENT, "group_name", NO_WORD),
    ("/update_weights_from_distributed", SENT, "load_format", [*NO_WORD, "gguf"]),
    ("/init_weights_update_group", JOIN, "master_address", NO_WORD),
    ("/init_weights_update_group", JOIN, "master_port", [*NO_NUMBER, 0, 65536]),
    ("/init_weights_update_group", JOIN, "rank_offset", [*NO_NUMBER, 0]),
    ("/init_weights_update_group", JOIN, "world_size", [*NO_NUMBER, 0]),
    ("/init_weights_update_group", JOIN, "backend", NO_WORD),
    ("/destroy_weights_update_group", {}, "group_name", NO_WORD),
    ("/update_weight_version", {}, "new_version", [*NO_WORD, None]),
    ("/get_weights_by_name", {"name": "w"}, "truncate_size", [*NO_NUMBER, 0]),
    ("/get_weights_by_name", {}, "name", [*NO_WORD, None]),
]


@pytest.mark.parametrize(("path", "rest", "field", "values"), FIELDS)
@run
async def test_what_a_field_cannot_be_is_refused_by_name(embedded, path, rest, field, values):
    async with served(embedded) as it:
        for value in values:
            # As text, for what is too large for a float.
            body = json.dumps(rest | {field: value}).replace("Infinity", "1e400")
            reply = await it.http.post(path, content=body)
            assert reply.status_code == 400, (value, reply.text)
            told = reply.json()["error"]["message"]
            assert field in told or "Number out of range" in told, value
        reply = await it.http.post(path, json=rest | {"colour": 1})
        assert reply.status_code == 400
        assert "unknown field `colour`" in reply.json()["error"]["message"]
        for query in (f"{field}=1&{field}=2", "colour=1"):
            if field not in {"tags", "activities"} or "colour" in query:
                assert (await it.http.post(f"{path}?{query}")).status_code == 400
        assert it.fake.calls == []


@run
async def test_settings_that_no_message_holds_are_refused_with_several_workers_too(embedded):
    body = json.dumps({"server_args": {"chunked_prefill_size": 10**30}})
    async with served(embedded) as it:
        reply = await it.http.post("/set_internal_state", content=body)
        assert reply.status_code == 400, reply.text
    async with served_by_workers(embedded) as it:
        reply = await it.workers[0].http.post("/set_internal_state", content=body)
        assert reply.status_code == 400, reply.text
        assert "cannot be sent to the engine" in reply.json()["error"]["message"]


def unbounded(hint, bounds=False):
    """Return whether a type holds an integer, or a float, without both of its bounds."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        bounds = any(
            isinstance(note, Meta) and note.ge is not None and note.le is not None for note in notes
        )
        return unbounded(inner, bounds)
    if hint in {int, float}:
        return not bounds
    return any(unbounded(each) for each in get_args(hint))


@run
async def test_every_number_of_a_control_route_has_bounds(embedded):
    async with served(embedded) as it:
        operations = [app for *_, app in control_routes(it.service) if isinstance(app, Operation)]
        assert len(operations) > 20
        for operation in operations:
            fields: type[Struct] = operation._fields
            for name, hint in get_type_hints(fields, include_extras=True).items():
                assert not unbounded(hint), f"{fields.__name__}.{name}"
