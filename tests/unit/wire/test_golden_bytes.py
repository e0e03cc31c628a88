"""Messages whose bytes are fixed: what the original encoder produced, field by field and back."""

import msgspec
import pytest
from msgspec.structs import replace

from drumline.wire.codec import converted, decoder, encode
from drumline.wire.control import (
    AbortReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseSchedulerReqInput,
    ProfileReq,
    ProfileReqType,
)
from drumline.wire.frames import abort_frames, add_frames, call_frames
from drumline.wire.handshake import Addresses, Greeting, Init, identity_of
from drumline.wire.multimodal import (
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    ShmTensorHandle,
    WireTensor,
    packed,
    unpacked,
)
from drumline.wire.output import BatchTokenIDOutSlim, LoadSnapshot
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams, normalized, seed_of

F0, F1 = "cb0000000000000000", "cb3ff0000000000000"

GREEDY = f"dc001d08c0c0{F1}{F1}01{F0}{F0}{F0}{F1}00c0c0c0c0c2c3c3c2c0c0c0c000c001" + "9000c3"
GENERATE = (
    "dc0019b9546f6b656e697a656447656e6572617465526571496e707574a27231c0c093010203"
    "dc001d08c09102cb3fe0000000000000cb3feccccccccccccdce40000000cb0000000000000000"
    "cb0000000000000000cb0000000000000000cb3ff000000000000000c0c0c0c0c2c3c3c2c0c0c0c0"
    "ce0d0e09b1c0019000c3c2ff00c0c2c0c0c0c2cb0000000000000000c0c0c0c0c0c0c0c0c0"
)
SLIM = (
    "9eb34261746368546f6b656e49444f7574536c696d91a57665632d3191920a0b91a66c656e677468"
    "9103910291019192cbbfe0000000000000cbbfd000000000000091920a0b01020564cd0190"
)
IMAGE = (
    "97919a017bc09192010493a7666c6f61743332920203c71803000000000000803f0000004000004040"
    "000080400000a040c081ae696d6167655f677269645f74687793a5696e743634920103c71803"
    "010000000000000002000000000000000200000000000000c0c0c007c0c0c0c0c0"
)
VIDEO = "97919a02c0c0c093a7666c6f61743332914001c080c0c0c0c0c0c0c0c0c0"


def generate_request():
    params = SamplingParams(max_new_tokens=8, temperature=0.5, top_p=0.9, stop_token_ids={2})
    return TokenizedGenerateReqInput(
        rid="r1",
        input_ids=[1, 2, 3],
        sampling_params=replace(normalized(params), seed=seed_of("r1")),
    )


def image_inputs():
    frames = []
    feature = bytes.fromhex("000000000000803f0000004000004040000080400000a040")
    grid = b"".join(n.to_bytes(8, "little") for n in (1, 2, 2))
    inputs = MultimodalInputs(
        mm_items=[
            MultimodalDataItem(
                modality=Modality.IMAGE,
                hash=123,
                offsets=[(1, 4)],
                feature=packed("float32", (2, 3), feature, frames),
                model_specific_data={"image_grid_thw": packed("int64", (1, 3), grid, frames)},
            )
        ],
        im_token_id=7,
    )
    assert frames == []
    return inputs


GOLDEN = [
    ("greedy sampling", GREEDY, normalized(SamplingParams(max_new_tokens=8, temperature=0))),
    ("generate request", GENERATE, generate_request()),
    ("abort", "93a841626f7274526571a27231c0", AbortReq(rid="r1")),
    ("flush", "93b2466c7573684361636865526571496e707574c0c0", FlushCacheReqInput()),
    (
        "flush reply",
        "94b3466c75736843616368655265714f7574707574a27239c0c3",
        FlushCacheReqOutput(rid="r9", success=True),
    ),
    (
        "pause",
        "94b650617573655363686564756c6572526571496e707574c0c0a46b656570",
        PauseSchedulerReqInput(mode="keep"),
    ),
    (
        "profile",
        "9caa50726f66696c65526571c0c001c0c0c0c0c2c0c0c0",
        ProfileReq(type=ProfileReqType.START),
    ),
    (
        "load snapshot",
        "9aac4c6f6164536e617073686f74a2616201000203040506cd0bb8",
        LoadSnapshot(
            epoch="ab",
            sequence=1,
            dp_rank=0,
            num_running_reqs=2,
            num_waiting_reqs=3,
            num_active_pages=4,
            num_used_pages=5,
            max_total_pages=6,
            valid_for_ms=3000,
        ),
    ),
    ("image", IMAGE, image_inputs()),
    (
        "shared memory",
        "83a873686d5f6e616d65a570736d5f78a57368617065920203a56474797065a7666c6f61743136",
        ShmTensorHandle(shm_name="psm_x", shape=(2, 3), dtype="float16"),
    ),
    (
        "hello",
        "84a6737461747573a548454c4c4fa56c6f63616cc3a8686561646c657373c3"
        "b4706172616c6c656c5f636f6e6669675f68617368c0",
        Greeting(status="HELLO"),
    ),
    (
        "hello of a group",
        "85a6737461747573a548454c4c4fa56c6f63616cc3a8686561646c657373c3"
        "b4706172616c6c656c5f636f6e6669675f68617368c0ac656e67696e655f636f756e7402",
        Greeting(status="HELLO", engine_count=2),
    ),
]


@pytest.mark.parametrize(
    ("golden", "value"), [row[1:] for row in GOLDEN], ids=[r[0] for r in GOLDEN]
)
def test_a_message_has_the_original_bytes_both_ways(golden, value):
    assert encode(value).hex() == golden
    assert decoder(type(value))(bytes.fromhex(golden)) == value


def test_init_has_the_original_bytes():
    init = Init(addresses=Addresses(inputs=["ipc://a"], outputs=["ipc://b"]))
    golden = (
        "82a961646472657373657385a6696e7075747391a76970633a2f2f61a76f75747075747391a7697063"
        "3a2f2f62b1636f6f7264696e61746f725f696e707574c0b2636f6f7264696e61746f725f6f7574707574c0"
        "be66726f6e74656e645f73746174735f7075626c6973685f61646472657373c0"
        "af706172616c6c656c5f636f6e66696780"
    )
    assert encode(init).hex() == golden


def test_a_batch_of_the_first_generation_is_read_and_its_part_of_ours_has_its_bytes():
    batch = BatchTokenIDOutSlim(
        rids=["vec-1"],
        output_ids=[[10, 11]],
        finished_reasons=["length"],
        prompt_tokens=[3],
        completion_tokens=[2],
        cached_tokens=[1],
        output_token_logprobs_val=[[-0.5, -0.25]],
        output_token_logprobs_idx=[[10, 11]],
        engine_index=1,
        num_running=2,
        num_waiting=5,
        kv_active_pages=100,
        kv_total_pages=400,
    )
    golden = bytes.fromhex(SLIM)
    assert decoder(BatchTokenIDOutSlim)(golden) == batch
    ours = encode(batch)
    assert ours[:3].hex() == "dc0017"  # the tag and 22 columns
    assert ours[3:].startswith(golden[1:])


def test_an_empty_batch_is_the_load_alone():
    golden = bytes.fromhex("9eb3" + b"BatchTokenIDOutSlim".hex() + "90" * 8 + "00000000cd0200")
    batch = decoder(BatchTokenIDOutSlim)(golden)
    assert batch.rids == []
    assert batch.kv_total_pages == 512
    assert encode(batch)[3:].startswith(golden[1:])


def test_a_large_tensor_lies_in_a_frame_of_its_own():
    data = bytes(256)
    frames = []
    item = MultimodalDataItem(
        modality=Modality.VIDEO, feature=packed("float32", (64,), data, frames)
    )
    inputs = MultimodalInputs(mm_items=[item])
    assert encode(inputs).hex() == VIDEO
    assert frames == [data]
    decoded = decoder(MultimodalInputs)(bytes.fromhex(VIDEO))
    assert unpacked(decoded.mm_items[0].feature, frames) == data


@pytest.mark.parametrize(
    ("golden", "dtype", "shape", "data"),
    [
        ("93a862666c6f617431369102d603803f803f", "bfloat16", (2,), "803f803f"),
        ("93a33c69349102d7030000000001000000", "<i4", (2,), "0000000001000000"),
        ("93a5696e74363490d7030300000000000000", "int64", (), "0300000000000000"),
    ],
)
def test_a_small_tensor_has_the_original_bytes_both_ways(golden, dtype, shape, data):
    raw = bytes.fromhex(data)
    assert encode(packed(dtype, shape, raw, [])).hex() == golden
    tensor = decoder(WireTensor)(bytes.fromhex(golden))
    assert (tensor.dtype, tensor.shape) == (dtype, shape)
    assert unpacked(tensor, []) == raw


@pytest.mark.parametrize(("size", "inline"), [(255, True), (256, False)])
def test_a_tensor_leaves_the_message_at_256_bytes(size, inline):
    frames = []
    packed("uint8", (size,), bytes(size), frames)
    assert (frames == []) == inline


def test_input_messages_begin_with_their_type():
    assert abort_frames(["r1"]) == [b"\x01", bytes.fromhex("91a27231")]
    assert call_frames(1, "flush_cache", [0.0]) == [b"\x02", encode([1, "flush_cache", [0.0]])]
    assert add_frames(generate_request()) == [b"\x00", bytes.fromhex(GENERATE)]


def test_an_identity_is_two_bytes_little_endian():
    assert identity_of(1) == b"\x01\x00"
    assert identity_of(258) == b"\x02\x01"


def test_every_column_sits_in_its_slot():
    columns = [
        ["r"],
        [[1]],
        ["stop"],
        [2],
        [3],
        [4],
        [[5.5]],
        [[6]],
        7,
        8,
        9,
        10,
        11,
        [{"message": "m"}],
        [12],
        [13.5],
        [[None, 14.5]],
        [[15, 16]],
        [[None, [17.5]]],
        [[None, [18]]],
        [[[19.5]]],
        [[[20]]],
    ]
    batch = converted(["BatchTokenIDOutSlim", *columns], BatchTokenIDOutSlim)
    assert [getattr(batch, name) for name in batch.__struct_fields__] == columns
    assert msgspec.msgpack.decode(encode(batch)) == ["BatchTokenIDOutSlim", *columns]
    assert batch.__struct_fields__ == (
        "rids",
        "output_ids",
        "finished_reasons",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "output_token_logprobs_val",
        "output_token_logprobs_idx",
        "engine_index",
        "num_running",
        "num_waiting",
        "kv_active_pages",
        "kv_total_pages",
        "finish_reason_details",
        "spec_verify_ct",
        "accept_draft_tokens",
        "input_token_logprobs_val",
        "input_token_logprobs_idx",
        "input_top_logprobs_val",
        "input_top_logprobs_idx",
        "output_top_logprobs_val",
        "output_top_logprobs_idx",
    )
