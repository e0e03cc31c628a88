"""What decoding lets pass and what it refuses, and that nothing else can happen."""

import struct
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from drumline.wire.codec import MalformedFrameError, decode_any, decoder, encode, readable_rid
from drumline.wire.control import (
    PauseSchedulerReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from drumline.wire.frames import (
    Call,
    call_frames,
    carries_tensors,
    decode_control,
    decode_generate,
    decode_rids,
    kind_of,
)
from drumline.wire.handshake import (
    Registration,
    declared_layouts,
    decode_greeting,
    decode_init,
    decode_registration,
    engine_of,
)
from drumline.wire.layout import decode_output, output_decoder
from drumline.wire.multimodal import (
    INLINE_BELOW_BYTES,
    Modality,
    MultimodalInputs,
    WireTensor,
    pad_value,
    unpacked,
)
from drumline.wire.output import BatchTokenIDOutSlim, ControlReplySlim, ragged
from drumline.wire.request import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams, normalized

TAG = "TokenizedGenerateReqInput"
SIX = [TAG, "r1", None, None, [1], []]


def generate(*elements):
    return decode_generate(encode(list(elements)))


class TestArrays:
    def test_a_shorter_array_takes_defaults(self):
        request = generate(*SIX)
        assert request.sampling_params == SamplingParams()
        assert request.logprob_start_len == -1

    def test_the_last_required_slot_must_be_there(self):
        with pytest.raises(MalformedFrameError):
            generate(*SIX[:-1])

    def test_elements_behind_the_last_slot_are_ignored(self):
        whole = msgspec.msgpack.decode(encode(generate(*SIX)))
        assert generate(*whole, "later", {"x": 1}) == generate(*SIX)

    def test_nil_where_none_is_allowed_is_refused(self):
        with pytest.raises(MalformedFrameError, match=r"\$\[5\]"):
            generate(TAG, "r1", None, None, [1], None)

    def test_a_whole_number_is_a_float_but_a_float_is_no_whole_number(self):
        assert generate(TAG, "r1", None, None, [1], [4, None, None, 1]).sampling_params == (
            SamplingParams(max_new_tokens=4, temperature=1.0)
        )
        with pytest.raises(MalformedFrameError):
            generate(TAG, "r1", None, None, [1], [4.0])
        with pytest.raises(MalformedFrameError):
            generate(TAG, "r1", None, None, [1.5], [])

    def test_a_short_float_is_a_float(self):
        whole = encode([*SIX[:-1], [4, None, None, 0.5]])
        short = whole[:-9] + b"\xca" + struct.pack(">f", 0.5)
        assert decode_generate(short).sampling_params.temperature == 0.5

    @pytest.mark.parametrize("tag", ["Other", "tokenizedgeneratereqinput", 1, None])
    def test_a_wrong_tag_is_refused(self, tag):
        with pytest.raises(MalformedFrameError):
            generate(tag, *SIX[1:])

    def test_bytes_are_no_string(self):
        with pytest.raises(MalformedFrameError):
            generate(TAG, b"r1", *SIX[2:])

    def test_a_room_may_have_64_bits(self):
        full = [*SIX, False, -1, 0, None, False, None, None, None, False, 0, "h", 1, 2**64 - 1]
        assert generate(*full).bootstrap_room == 2**64 - 1

    def test_required_slots_may_come_behind_defaults(self):
        tag = "UpdateWeightsFromDistributedReqInput"
        short = [tag, None, None, ["w"], ["float32"], [[1]], "group", True]
        decode = decoder(UpdateWeightsFromDistributedReqInput)
        with pytest.raises(MalformedFrameError):
            decode(encode(short))
        assert decode(encode([*short, None])).group_name == "group"


class TestMaps:
    def test_unknown_keys_are_ignored(self):
        assert decode_greeting(encode({"status": "HELLO", "engine_count": 2})).status == "HELLO"

    def test_another_word_than_hello_or_ready_is_refused(self):
        with pytest.raises(MalformedFrameError):
            decode_greeting(encode({"status": "HI"}))

    def test_the_granularity_may_be_called_block_size(self):
        fields = {"max_model_len": 9, "num_gpu_blocks": 5, "block_size": 16, "dtype": "bfloat16"}
        assert decode_registration(encode(fields)).prefix_granularity == 16
        del fields["block_size"]
        with pytest.raises(MalformedFrameError, match="prefix_granularity"):
            decode_registration(encode(fields))

    def test_a_dtype_that_is_none_is_refused(self):
        fields = {"max_model_len": 9, "num_gpu_blocks": 5, "block_size": 16, "dtype": "int4"}
        with pytest.raises(MalformedFrameError):
            decode_registration(encode(fields))

    def test_a_registration_goes_out_in_full(self):
        registration = Registration(
            max_model_len=9, num_gpu_blocks=5, prefix_granularity=16, dtype="float32"
        )
        fields = msgspec.msgpack.decode(encode(registration))
        assert list(fields) == list(Registration.__struct_fields__)
        assert decode_registration(encode(registration)) == registration


class TestTensors:
    def test_pickles_are_refused(self):
        for code in (1, 2, 4):
            with pytest.raises(MalformedFrameError):
                decoder(WireTensor)(encode(["float32", [1], Ext(code, b"abcd")]))
            with pytest.raises(MalformedFrameError):
                decode_any(encode({"x": Ext(code, b"abcd")}))
        with pytest.raises(MalformedFrameError):
            decode_control(encode(["PickleWrapper", b"\x80\x04."]))

    @pytest.mark.parametrize(
        ("dtype", "shape", "data", "frames"),
        [
            ("float32", [2], 1, []),
            ("float32", [2], 0, [bytes(8)]),
            ("float32", [2], -1, [bytes(8)]),
            ("float32", [3], 1, [bytes(8)]),
            ("complex64", [1], 1, [bytes(8)]),
            ("<f3", [1], 1, [bytes(8)]),
            ("float32", [3], Ext(3, bytes(8)), []),
        ],
    )
    def test_a_tensor_whose_bytes_do_not_fit_is_refused(self, dtype, shape, data, frames):
        tensor = decoder(WireTensor)(encode([dtype, shape, data]))
        with pytest.raises(MalformedFrameError):
            unpacked(tensor, frames)

    def test_a_negative_size_is_refused(self):
        with pytest.raises(MalformedFrameError):
            decoder(WireTensor)(encode(["float32", [-1], 1]))

    def test_a_pad_value_lies_in_its_modality_s_interval(self):
        span = (2**31 - 1 - 1_000_000 + 1) // 3
        for order, modality in enumerate(Modality):
            assert pad_value(modality, 5) == 1_000_000 + order * span + 5
            assert pad_value(modality, span + 5) == pad_value(modality, 5)


class TestSampling:
    def test_zero_temperature_is_greedy_with_seed_zero(self):
        final = normalized(SamplingParams(temperature=1e-7, seed=9))
        assert (final.temperature, final.top_k, final.seed) == (1.0, 1, 0)

    def test_greedy_however_reached_has_seed_zero(self):
        assert normalized(SamplingParams(top_k=1, seed=9)).seed == 0

    def test_no_top_k_is_the_sentinel(self):
        assert normalized(SamplingParams()).top_k == 1 << 30

    def test_stops_become_a_list_with_their_longest_length(self):
        final = normalized(SamplingParams(stop="end"))
        assert (final.stop_strs, final.stop_str_max_len) == (["end"], 3)
        final = normalized(SamplingParams(stop=["a", "bcd"]), lambda stop: 2 * len(stop))
        assert (final.stop_strs, final.stop_str_max_len) == (["a", "bcd"], 6)

    def test_what_is_normalized_stays_as_it_is(self):
        once = normalized(SamplingParams(temperature=0.0, stop=["a"]))
        assert normalized(once) is once
        given = SamplingParams(temperature=0.0, is_normalized=True)
        assert normalized(given).temperature == 0.0

    def test_no_stop_ids_are_nil(self):
        assert normalized(SamplingParams(stop_token_ids=set())).stop_token_ids is None


class TestOutputs:
    def rows(self, **changes):
        columns = {
            "rids": ["a", "b"],
            "output_ids": [[1], [2]],
            "finished_reasons": ["", "stop"],
            "prompt_tokens": [1, 1],
            "completion_tokens": [1, 1],
            "cached_tokens": [0, 0],
            "output_token_logprobs_val": [[], []],
            "output_token_logprobs_idx": [[], []],
        }
        return BatchTokenIDOutSlim(**(columns | changes))

    def read(self, **changes):
        """The same rows as they are read: without log probabilities that are none."""
        nothing = {"output_token_logprobs_val": [], "output_token_logprobs_idx": []}
        return self.rows(**(nothing | changes))

    @pytest.mark.parametrize("rows", [0, 1, 15, 16, 65_535, 65_536])
    def test_columns_that_say_nothing_are_not_unpacked(self, rows):
        full = ("output_ids", "prompt_tokens", "completion_tokens", "cached_tokens")
        empty = ("output_token_logprobs_val", "input_top_logprobs_idx", "output_top_logprobs_val")
        batch = self.rows(
            rids=["r"] * rows,
            finished_reasons=[""] * rows,
            **{name: [[1] if name == "output_ids" else 1] * rows for name in full},
            **{name: [[]] * rows for name in (*empty, "output_token_logprobs_idx")},
            finish_reason_details=[None] * rows,
            spec_verify_ct=[0] * rows,
        )
        read = decode_output(encode(batch))
        assert len(read.output_ids) == len(read.rids) == rows
        assert [getattr(read, name) for name in empty] == [[], [], []]
        assert read.finish_reason_details == []
        assert read.spec_verify_ct == []

    def test_a_column_in_which_one_row_says_something_is_read(self):
        said = {
            "output_token_logprobs_val": [[], [-0.5]],
            "output_token_logprobs_idx": [[], [7]],
            "finish_reason_details": [None, {"message": "m"}],
            "spec_verify_ct": [0, 3],
            "input_token_logprobs_val": [[None, -1.0], []],
        }
        assert decode_output(encode(self.rows(**said))) == self.rows(**said)

    def test_a_column_that_must_be_there_may_not_be_short(self):
        assert ragged(decode_output(encode(self.rows(cached_tokens=[])))) == "cached_tokens"
        with pytest.raises(MalformedFrameError, match="output_token_logprobs_val"):
            decode_output(encode(self.rows(output_token_logprobs_val=[])))

    @pytest.mark.parametrize(
        ("column", "value"),
        [
            ("output_token_logprobs_val", [["x"], []]),
            ("finish_reason_details", [1, None]),
            ("spec_verify_ct", [1.5, 0]),
        ],
    )
    def test_a_sparse_column_of_another_type_is_refused(self, column, value):
        with pytest.raises(MalformedFrameError):
            decode_output(encode(self.rows(**{column: value})))

    def test_a_column_of_another_length_is_found(self):
        assert ragged(self.rows()) is None
        assert ragged(self.rows(cached_tokens=[0])) == "cached_tokens"
        assert ragged(self.rows(finish_reason_details=[None])) == "finish_reason_details"
        assert ragged(self.rows(finish_reason_details=[None, None])) is None

    def test_a_reason_must_be_a_string(self):
        elements = msgspec.msgpack.decode(encode(self.rows()))
        elements[3] = ["", None]
        with pytest.raises(MalformedFrameError):
            decode_output(encode(elements))

    def test_a_batch_of_eight_columns_is_read(self):
        elements = msgspec.msgpack.decode(encode(self.rows()))[:9]
        assert decode_output(encode(elements)) == self.read()

    def test_optional_columns_are_found_by_the_names_an_engine_declares(self):
        layout = [
            *BatchTokenIDOutSlim.__struct_fields__[:13],
            "unknown",
            "output_top_logprobs_idx",
            "finish_reason_details",
        ]
        decode = output_decoder({"BatchTokenIDOutSlim": layout})
        elements = msgspec.msgpack.decode(encode(self.rows()))[:14]
        batch = decode(encode([*elements, 5, [[[7]], [[8]]], [None, {"message": "m"}]]))
        assert batch.finish_reason_details == [None, {"message": "m"}]
        assert batch.output_top_logprobs_idx == [[[7]], [[8]]]
        assert batch.spec_verify_ct == []
        assert decode(encode(elements[:9])) == self.rows()
        reply = ControlReplySlim(call_id=1, success=True, message=None)
        assert decode(encode(reply)) == reply

    def test_our_own_declaration_takes_the_fast_way(self):
        assert output_decoder(declared_layouts()) is decode_output
        assert output_decoder({}) is decode_output

    @pytest.mark.parametrize(
        "layouts",
        [
            {"ControlReplySlim": ["success", "call_id", "message", "engine_index"]},
            {"BatchTokenIDOutSlim": ["output_ids", "rids"]},
        ],
    )
    def test_a_fixed_part_in_another_order_is_refused(self, layouts):
        with pytest.raises(MalformedFrameError):
            output_decoder(layouts)

    def test_another_tag_is_no_output(self):
        with pytest.raises(MalformedFrameError):
            decode_output(encode(["HealthCheckOutput", None, None]))


class TestFrames:
    def test_a_call_is_told_from_an_operation_by_its_first_element(self):
        assert decode_control(encode([3, "flush_cache", [0.0]])) == Call(3, "flush_cache", [0.0])
        assert decode_control(encode([3, "flush_cache"])) == Call(3, "flush_cache", [])
        operation = PauseSchedulerReqInput(mode="wait")
        assert decode_control(encode(operation)) == operation

    def test_an_id_is_readable_before_the_place_that_is_broken(self):
        whole = encode(decode_generate(encode(SIX)))
        assert readable_rid(whole) == "r1"
        assert readable_rid(whole[:40]) == "r1"
        assert readable_rid(whole[:10]) is None
        assert readable_rid(encode(["T", "r" * 300, 1])) == "r" * 300
        assert readable_rid(encode(["T", 5, 1])) is None
        assert readable_rid(encode(["T", "", 1])) is None


DECODERS = [
    decode_any,
    decode_generate,
    decode_rids,
    decode_output,
    decode_control,
    decode_greeting,
    decode_init,
    decode_registration,
    engine_of,
    decoder(MultimodalInputs),
    decoder(TokenizedEmbeddingReqInput),
    output_decoder({"BatchTokenIDOutSlim": [*BatchTokenIDOutSlim.__struct_fields__[:13], "x"]}),
    lambda data: kind_of([data, data]),
    lambda data: kind_of([data]),
]

VALID = [
    encode(decode_generate(encode(SIX))),
    encode(TestOutputs().rows()),
    encode(["a", "b"]),
    encode([1, "flush_cache", []]),
    encode(PauseSchedulerReqInput()),
    encode(Registration(max_model_len=9, num_gpu_blocks=5, prefix_granularity=16, dtype="float32")),
]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.builds(Ext, st.integers(-128, 127), st.binary(max_size=16))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)
TAGS = st.sampled_from([TAG, "BatchTokenIDOutSlim", "ControlReplySlim", "ProfileReq"])


@st.composite
def damaged(draw):
    """A valid message with a few bytes changed, or cut short."""
    data = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


def tagged(tag, elements):
    return encode([tag, *elements])


HOSTILE = (
    st.binary(max_size=64)
    | damaged()
    | VALUES.map(encode)
    | st.builds(tagged, TAGS, st.lists(VALUES, max_size=24))
    | st.builds(lambda depth: b"\x91" * depth, st.integers(0, 5000))
)


@settings(max_examples=200, deadline=None)
@given(HOSTILE)
def test_no_bytes_raise_anything_but_the_one_error(data):
    for decode in DECODERS:
        with suppress(MalformedFrameError):
            decode(data)
    assert readable_rid(data) is None or isinstance(readable_rid(data), str)


TENSORS = "update_weights_from_tensor"


@pytest.mark.parametrize("call_id", [0, 127, 128, 1 << 15, 1 << 31, 1 << 63])
def test_a_call_carries_tensors_by_its_method_alone(call_id):
    assert carries_tensors(call_frames(call_id, TENSORS, [[b"x"]])[1])
    for method, args in (
        ("flush_cache", [TENSORS]),
        (TENSORS + "s", []),
        ("x" + TENSORS, []),
        ("get_weights_by_name", [TENSORS]),
    ):
        assert not carries_tensors(call_frames(call_id, method, args)[1])


def test_an_operation_of_its_own_carries_tensors_by_its_name_alone():
    asked = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[], load_format=None, flush_cache=True
    )
    assert carries_tensors(encode(asked))
    assert not carries_tensors(encode(["UpdateWeightsFromTensorReqInputs", []]))
    assert not carries_tensors(encode(PauseSchedulerReqInput()))
    assert not carries_tensors(b"")


@given(st.integers(0, 2 * INLINE_BELOW_BYTES))
def test_a_request_survives_its_journey(count):
    request = TokenizedGenerateReqInput(
        rid="r", input_ids=list(range(count)), sampling_params=SamplingParams(seed=count)
    )
    assert decode_generate(encode(request)) == request
