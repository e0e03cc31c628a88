"""What calls about weights ask for, under their names, by struct and in a map of arguments."""

import pytest

from drumline.contract.messages import CallAsked
from drumline.contract.weights import DiskWeights, NamedTensor, SentWeights
from drumline.control.operations import JoinGroup, LeaveGroup, TensorParts, WeightsAsked
from drumline.control.weight_calls import METHODS, CallRefusedError, operation, rows_asked
from drumline.wire.control import (
    DestroyWeightsUpdateGroupReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    call_of,
)

TWO = (NamedTensor("a", "bfloat16", (2, 3)), NamedTensor("b", "float32", ()))

BY_STRUCT = [
    (
        UpdateWeightFromDiskReqInput(model_path="/m", load_format="gguf", weight_version="2"),
        WeightsAsked(7, DiskWeights("/m"), True, "2"),
    ),
    (
        UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[b"x", b"y"],
            load_format=None,
            flush_cache=False,
            weight_version="3",
        ),
        WeightsAsked(7, TensorParts((b"x", b"y")), False, "3"),
    ),
    (
        UpdateWeightsFromDistributedReqInput(
            names=["a", "b"],
            dtype_names=["torch.bfloat16", "float32"],
            shapes=[[2, 3], []],
            group_name="g",
            flush_cache=False,
            weight_version=None,
        ),
        WeightsAsked(7, SentWeights("g", TWO), False, None),
    ),
    (
        InitWeightsUpdateGroupReqInput(
            master_address="h", master_port=1, rank_offset=2, world_size=5, backend="gloo"
        ),
        WeightsAsked(7, JoinGroup("h", 1, 2, 5, "weight_update_group", "gloo")),
    ),
    (
        DestroyWeightsUpdateGroupReqInput(group_name="g"),
        WeightsAsked(7, LeaveGroup("g")),
    ),
]


@pytest.mark.parametrize(("native", "asked"), BY_STRUCT)
def test_an_operation_by_struct_asks_for_what_it_says(native, asked):
    method, args = call_of(native)
    assert operation(CallAsked(7, method, args)) == asked


def test_every_operation_on_weights_that_the_wire_has_by_struct_is_done():
    assert {call_of(native)[0] for native, _ in BY_STRUCT} == set(METHODS)


def test_arguments_may_stand_in_a_map_and_bytes_in_base64():
    given = {"serialized_named_tensors": ["eHg="], "flush_cache": False}
    asked = operation(CallAsked(7, "update_weights_from_tensor", (given,)))
    assert asked == WeightsAsked(7, TensorParts((b"xx",)), False)
    with pytest.raises(CallRefusedError, match="unknown field `rank`; it takes master_address"):
        operation(CallAsked(7, "init_weights_update_group", ({"rank": 1},)))


def test_a_weight_is_asked_for_by_struct_as_by_name():
    method, args = call_of(GetWeightsByNameReqInput(name="w", truncate_size=3))
    asked = rows_asked(CallAsked(7, method, args))
    assert (method, asked.name, asked.rows) == ("get_weights_by_name", "w", 3)
