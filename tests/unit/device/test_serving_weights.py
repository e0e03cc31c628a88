"""Tensors that take the place of weights while a rank serves, from a message or a trainer."""

import json
import pickle
import time

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from drumline.contract.regions import Region
from drumline.contract.weights import (
    DiskWeights,
    NamedTensor,
    SentWeights,
    TensorWeights,
    WeightGroup,
)
from drumline.core.clock import SystemClock
from drumline.core.config import WeightUpdatePolicy
from drumline.core.errors import InvariantError
from drumline.core.model_files import find_model
from drumline.device.attention import TorchAttention
from drumline.device.blocks import whole
from drumline.device.layers import Backend, TorchLinear
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.shard import shard_of
from drumline.device.serving_weights import ServingWeights
from drumline.device.trainer_group import Meeting, TrainerGroup, why_unfit
from drumline.device.weight_loader import WeightLoader
from drumline.device.weights.tensors import read_tensors

from .conftest import FAMILIES, Rig, random_model, small_config
from .trainer import Trainer, free_port

GROUP = "weight_update_group"
PROMPT = np.arange(3, 40).astype(np.int32)
QUERY = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def other_tensors(family="llama"):
    """Return other weights of a family, by name."""
    generator = torch.Generator().manual_seed(99)
    return {
        name: tensor * (1 + 0.3 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in safetensors_of(random_model(family))
    }


def safetensors_of(model):
    tied = model.config.tie_word_embeddings
    return [
        (name, tensor) for name, tensor in model.state_dict().items() if not (tied and name == HEAD)
    ]


OTHERS = other_tensors()


def bytes_of(**tensors):
    return safetensors.torch.save({name.replace("__", "."): t for name, t in tensors.items()})


@pytest.fixture
def made():
    """Return a function that makes a rig of a family; stopped at teardown."""
    rigs = []

    def make(directory, **model):
        config = small_config(directory)
        rigs.append(Rig(replace(config, model=replace(config.model, **model))))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.plane.shutdown()


@pytest.fixture
def rig(made, checkpoint):
    return made(checkpoint("llama")[1], weight_update_timeout=1.0)


def rows(plane, name, count=100):
    """Return a weight's first rows; the rank has all of them."""
    told = plane.read_weight(name, count)
    assert not isinstance(told, str), told
    return torch.frombuffer(bytearray(told.data), dtype=torch.float32).view(-1, *told.shape[1:])


def take(plane, source):
    assert plane.open_weights(source) is None
    assert plane.load_weights() is None
    plane.settle_weights(True)


def test_tensors_replace_the_weights_they_name_and_no_others(rig, made, tmp_path, checkpoint):
    directory = checkpoint("llama")[1]
    stored = safetensors.torch.load_file(directory / "model.safetensors")
    some = {QUERY: OTHERS[QUERY], NORM: OTHERS[NORM].bfloat16(), HEAD: OTHERS[HEAD]}
    before = rig.generate(1, "a", PROMPT, 8)
    update = TensorWeights(safetensors.torch.save(some))
    assert rig.plane.open_weights(update) is None
    assert rig.plane.load_weights() is None
    assert torch.equal(rows(rig.plane, QUERY), stored[QUERY]), "nothing changes before it is agreed"
    rig.plane.settle_weights(True)
    after = rig.generate(2, "b", PROMPT, 8)
    # As an engine answers that starts with them.
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    mixed = stored | {name: tensor.float() for name, tensor in some.items()}
    safetensors.torch.save_file(mixed, tmp_path / "model.safetensors")
    fresh = made(tmp_path)
    for name, tensor in mixed.items():
        assert torch.equal(rows(rig.plane, name, 1000), tensor), name
    assert after == fresh.generate(1, "c", PROMPT, 8) != before


REFUSED = [
    ({"model.layers.1.self_attn.query.weight": OTHERS[QUERY]},
     f"no weight here is called model.layers.1.self_attn.query.weight; one is {QUERY}"),
    ({NORM: OTHERS[NORM], QUERY: OTHERS[QUERY][1:]}, f"{QUERY} has shape [63, 64]; here it is "),
    ({QUERY: OTHERS[QUERY].to(torch.int8)},
     f"{QUERY} is of int8; weights are float32, float16, bfloat16, float64"),
    ({}, "no tensor is named"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "reason"), REFUSED)
def test_tensors_that_do_not_fit_are_refused_by_name(rig, tensors, reason):
    fault = rig.plane.open_weights(TensorWeights(safetensors.torch.save(tensors)))
    assert fault is not None
    assert fault.startswith(reason)
    rig.plane.settle_weights(False)


def archived(tmp_path):
    torch.save({QUERY: OTHERS[QUERY]}, tmp_path / "t.pt")
    return (tmp_path / "t.pt").read_bytes()


def test_bytes_that_are_pickled_or_broken_are_refused_and_nothing_in_them_runs(rig, tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path.joinpath("sprung").touch, ())

    for pickled in (pickle.dumps([(QUERY, Trap())]), archived(tmp_path)):
        fault = rig.plane.open_weights(TensorWeights(pickled))
        assert fault.startswith("the tensors are pickled, and a pickle can run any code")
    assert not (tmp_path / "sprung").exists()
    good = safetensors.torch.save({QUERY: OTHERS[QUERY]})
    for broken in (b"", good[:-1], good[:40], b"\0" * 64, good + b"\0"):
        fault = rig.plane.open_weights(TensorWeights(broken))
        assert fault.startswith(f"the {len(broken)} bytes are no safetensors file: ")


def test_a_header_whose_length_begins_as_a_pickle_does_is_no_pickle():
    saved = (safetensors.torch.save({"x" * n: torch.ones(1)}) for n in range(1, 256))
    data = next(data for data in saved if data.startswith(b"\x80"))
    assert all(torch.equal(tensor, torch.ones(1)) for tensor in read_tensors(data).values())


def test_an_update_without_room_beside_what_serves_is_refused(rig, monkeypatch):
    monkeypatch.setattr(rig.built.handle.weights._loader, "_available_bytes", lambda: 1 << 10)
    fault = rig.plane.open_weights(TensorWeights(safetensors.torch.save({QUERY: OTHERS[QUERY]})))
    assert fault.endswith("which take 0 MiB; 0 MiB are available")


def test_weights_that_are_away_are_neither_told_nor_updated(rig):
    rig.plane.release_memory((Region.WEIGHTS,))
    update = TensorWeights(safetensors.torch.save({QUERY: OTHERS[QUERY]}))
    for told in (rig.plane.open_weights(update), rig.plane.read_weight(QUERY, 1)):
        assert told == "the weights are released; call resume_memory_occupation first"
    rig.plane.restore_memory((Region.WEIGHTS,))
    take(rig.plane, update)
    assert torch.equal(rows(rig.plane, QUERY), OTHERS[QUERY])


def test_an_update_comes_while_the_kv_cache_is_away(rig):
    rig.plane.release_memory((Region.WEIGHTS, Region.KV_CACHE))
    rig.plane.restore_memory((Region.WEIGHTS,))
    take(rig.plane, TensorWeights(safetensors.torch.save({QUERY: OTHERS[QUERY]})))
    rig.plane.restore_memory((Region.KV_CACHE,))
    assert torch.equal(rows(rig.plane, QUERY), OTHERS[QUERY])
    assert len(rig.generate(1, "a", PROMPT, 3)) == 3


@pytest.mark.parametrize("policy", WeightUpdatePolicy)
def test_weights_that_were_dropped_come_again_one_by_one_or_from_a_disk(made, checkpoint, policy):
    directory = checkpoint("llama, tied")[1]
    rig = made(directory, weight_update_policy=policy)
    before = rig.generate(1, "a", PROMPT, 8)
    stored = safetensors.torch.load_file(directory / "model.safetensors")
    assert rig.plane.absent_weight() is None
    rig.plane.drop_weights()
    assert rig.plane.open_weights(DiskWeights(str(directory))).startswith("the weights are rel")
    rig.plane.restore_memory((Region.WEIGHTS,))
    told = rig.plane.read_weight(QUERY, 1)
    assert told == f"{QUERY} was dropped with all weights, and was not loaded since"
    names = sorted(stored, reverse=True)
    for name in names:
        assert rig.plane.absent_weight() is not None
        given = HEAD if name == EMBEDDING else name
        take(rig.plane, TensorWeights(safetensors.torch.save({given: stored[name]})))
        assert torch.equal(rows(rig.plane, name, 1000), stored[name])
    assert rig.plane.absent_weight() is None
    assert rig.generate(2, "b", PROMPT, 8) == before
    rig.plane.drop_weights()
    rig.plane.restore_memory((Region.WEIGHTS,))
    take(rig.plane, DiskWeights(str(directory)))
    assert rig.plane.absent_weight() is None
    assert rig.generate(3, "c", PROMPT, 8) == before


def test_tied_embeddings_are_one_weight_of_two_names_that_must_not_differ(made, checkpoint):
    rig = made(checkpoint("llama, tied")[1])
    new = OTHERS[EMBEDDING]
    take(rig.plane, TensorWeights(safetensors.torch.save({HEAD: new})))
    assert torch.equal(rows(rig.plane, EMBEDDING, 1000), new)
    both = {EMBEDDING: new + 1, HEAD: new.clone()}
    assert rig.plane.open_weights(TensorWeights(safetensors.torch.save(both))) is None
    fault = rig.plane.load_weights()
    assert fault.endswith("are one weight of this model, and differ")
    rig.plane.settle_weights(False)
    assert torch.equal(rows(rig.plane, HEAD, 1000), new)
    take(rig.plane, TensorWeights(safetensors.torch.save(both | {HEAD: new + 1})))
    assert torch.equal(rows(rig.plane, HEAD, 1000), new + 1)


def test_so_many_values_of_a_weight_that_nobody_reads_them_are_refused(rig, monkeypatch):
    monkeypatch.setattr("drumline.device.serving_weights._MOST_VALUES", 640)
    assert rows(rig.plane, QUERY, 10).shape == (10, 64)
    fault = rig.plane.read_weight(QUERY, 11)
    assert fault.startswith(f"{QUERY} has 704 values in so many rows, of its shape [64, 64]")
    assert rig.plane.read_weight("model.norm", 1).startswith("no weight here is called model.norm")


class Seat:
    """A place in a tensor-parallel group that exchanges nothing."""

    def __init__(self, index, size):
        self.index, self.size = index, size


class Computing:
    """What a rank's weights are handed to."""

    def replace(self, model):
        self.model = model


REFERENCE = Backend("torch", TorchLinear, TorchAttention)


def seated(directory, index, size, backend=REFERENCE, stage=0, stages=1):
    """Return the weights of one rank of several."""
    opened = open_checkpoint(find_model(str(directory)))
    loader = WeightLoader(
        opened.config,
        backend,
        torch.float32,
        torch.device("cpu"),
        Seat(index, size),
        whole,
        lambda: 1 << 40,
        shard_of(opened.config, index, size, stage, stages),
    )
    return ServingWeights(
        loader.load(opened), loader, Computing(), SystemClock(), discards=False, timeout_s=1
    )


def together(members, name, count):
    """Return a weight's first rows, as the ranks have them in parts."""
    out = None
    for member in members:
        told = member.rows(name, count)
        shape = min(count, told.shape[0]), *told.shape[1:]
        out = torch.full(shape, torch.nan) if out is None else out
        values = torch.frombuffer(bytearray(told.data or b"\0" * 4), dtype=torch.float32)
        values = values[: len(told.data) // 4]
        if told.dim is None:
            out[:] = values.view(shape)
        elif told.dim == 0:
            out[told.start : told.stop] = values.view(-1, *shape[1:])
        else:
            out[:, told.start : told.stop] = values.view(shape[0], -1)
    return out


@pytest.mark.parametrize(
    ("family", "size"), [*((family, 2) for family in FAMILIES), ("llama", 3), ("llama, biased", 4)]
)
def test_ranks_that_share_a_model_take_their_parts_of_every_weight(checkpoint, family, size):
    _, directory = checkpoint(family)
    members = [seated(directory, index, size) for index in range(size)]
    stored = safetensors.torch.load_file(directory / "model.safetensors")
    new = other_tensors(family)
    assert stored.keys() == new.keys()
    for name, tensor in stored.items():
        assert torch.equal(together(members, name, 1000), tensor), name
    update = TensorWeights(safetensors.torch.save(new))
    for member in members:
        assert (member.open(update), member.load()) == (None, None)
        member.settle(True)
    for name, tensor in new.items():
        assert torch.equal(together(members, name, 1000), tensor), name
        assert torch.equal(together(members, name, 7), tensor[:7]), name


def membership(trainer, name=GROUP, **changes):
    port = trainer if isinstance(trainer, int) else trainer.port
    member = WeightGroup(name, "127.0.0.1", port, 1, 2, "gloo")
    return replace(member, **changes)


def join(rig, trainer, **changes):
    """Open a group and join it; returns why that cannot be."""
    plane = rig.plane
    return plane.open_weight_group(membership(trainer, **changes)) or plane.join_weight_group()


def announced(*names, **changes):
    return SentWeights(
        GROUP,
        tuple(
            replace(NamedTensor(name, "float32", tuple(OTHERS[name].shape)), **changes)
            for name in names
        ),
    )


@pytest.fixture
def trainers():
    """Return a function that makes a trainer; all are gone at teardown."""
    made = []

    def make(*tensors, **how):
        made.append(Trainer(tensors, **how))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def test_a_trainers_tensors_come_in_their_order_and_types(rig, trainers):
    trainer = trainers(OTHERS[QUERY].bfloat16(), OTHERS[NORM])
    assert join(rig, trainer) is None
    again = join(rig, trainer)
    assert again == "there is a group weight_update_group already; destroy it first"
    sent = announced(QUERY, NORM)
    first = replace(sent.tensors[0], dtype="bfloat16")
    take(rig.plane, SentWeights(GROUP, (first, sent.tensors[1])))
    assert torch.equal(rows(rig.plane, QUERY), OTHERS[QUERY].bfloat16().float())
    assert torch.equal(rows(rig.plane, NORM), OTHERS[NORM])
    rig.plane.leave_weight_group(GROUP)
    rig.plane.leave_weight_group(GROUP)
    assert rig.plane.open_weights(sent).startswith("there is no group weight_update_group; call")


def test_what_a_trainer_announces_is_checked_before_anything_is_received(rig, trainers):
    trainer = trainers(OTHERS[NORM])
    join(rig, trainer)
    for sent, reason in (
        (announced(QUERY, shape=(64, 63)), "has shape [64, 63]; here it is [64, 64]"),
        (announced(QUERY, dtype="int4"), "is of int4; weights are"),
        (announced(NORM, name="model.norm"), "no weight here is called model.norm"),
    ):
        assert reason in rig.plane.open_weights(sent)
    # What was sent meanwhile is of what is taken next.
    take(rig.plane, announced(NORM))
    assert torch.equal(rows(rig.plane, NORM), OTHERS[NORM])


@pytest.mark.parametrize(("leaves", "reason"), [(True, "Connection "), (False, "Timed out")])
def test_a_trainer_that_breaks_off_leaves_the_old_weights_serving(
    rig, trainers, checkpoint, leaves, reason
):
    stored = safetensors.torch.load_file(checkpoint("llama")[1] / "model.safetensors")
    trainer = trainers(OTHERS[QUERY], leaves=leaves)
    assert join(rig, trainer) is None
    assert rig.plane.open_weights(announced(QUERY, NORM)) is None
    began = time.perf_counter()
    fault = rig.plane.load_weights()
    assert time.perf_counter() - began < 5
    assert fault.startswith(f"{NORM}, 2 of 2, did not come, and group weight_update_group is over")
    assert reason in fault
    rig.plane.settle_weights(False)
    for name in (QUERY, NORM):
        assert torch.equal(rows(rig.plane, name), stored[name])
    assert rig.plane.open_weights(announced(QUERY)).startswith("there is no group")
    assert rig.generate(1, "a", PROMPT, 3)


def test_a_rank_that_received_all_where_another_one_did_not_leaves_the_group(rig, trainers):
    trainer = trainers(OTHERS[QUERY])
    join(rig, trainer)
    assert rig.plane.open_weights(announced(QUERY)) is None
    rig.plane.settle_weights(False)
    assert rig.plane.open_weights(announced(QUERY)) is None, "nothing was received before"
    assert rig.plane.load_weights() is None
    rig.plane.settle_weights(False)
    assert not torch.equal(rows(rig.plane, QUERY), OTHERS[QUERY])
    assert rig.plane.open_weights(announced(QUERY)).startswith("there is no group")


def test_a_trainer_that_never_comes_is_waited_for_only_so_long(rig, trainers):
    began = time.perf_counter()
    port = free_port()
    fault = join(rig, port)
    assert fault.startswith(f"group {GROUP} did not meet at 127.0.0.1:{port} within 1 s: ")
    # One that comes, of a group that another one does not come to.
    trainer = trainers(size=3, waits_s=1)
    fault = join(rig, trainer, size=3)
    assert "did not meet" in fault
    trainer.close()
    assert trainer.fault is not None
    assert time.perf_counter() - began < 8
    assert rig.generate(1, "a", PROMPT, 3)


def test_a_backend_for_other_memory_is_refused_by_name(rig):
    fault = join(rig, 1, backend="nccl")
    assert fault == "backend nccl is not for weights in host memory, where these lie; use gloo"
    fault = join(rig, 1, backend="mpi")
    assert fault == "there is no backend mpi here; there are gloo, and nccl for weights on CUDA"
    fault = join(rig, 1, address="no.such.host.invalid")
    assert "did not meet at no.such.host.invalid:1" in fault


def test_what_carries_tensors_goes_by_where_the_weights_lie():
    for kind in ("cpu", "cuda"):
        assert why_unfit("gloo", torch.device(kind)) is None
    fault = why_unfit("nccl", torch.device("cuda"))
    assert (fault is None) is torch.distributed.is_nccl_available()
    assert fault is None or "built without" in fault


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL joins ranks on two devices")
def test_a_trainers_tensors_come_over_nccl_to_weights_on_a_device(trainers):
    trainer = trainers(OTHERS[QUERY].cuda(0), backend="nccl")
    where = torch.device("cuda", 1)
    meeting = Meeting(membership(trainer, backend="nccl"), 30.0, SystemClock())
    group = TrainerGroup(meeting, where)
    received = torch.empty_like(OTHERS[QUERY], device=where)
    group.receive(received)
    assert torch.equal(received.cpu(), OTHERS[QUERY])


# The policy to give up what serves before.


@pytest.fixture
def discarding(made, checkpoint):
    return made(
        checkpoint("llama")[1],
        weight_update_policy=WeightUpdatePolicy.DISCARD,
        weight_update_timeout=1.0,
    )


def test_discarded_weights_are_written_over_and_need_no_room(discarding, trainers, monkeypatch):
    rig = discarding
    monkeypatch.setattr(rig.built.handle.weights._loader, "_available_bytes", lambda: 0)
    assert rig.built.specs.discards_weights
    assert rig.plane.open_weights(
        TensorWeights(safetensors.torch.save({QUERY: OTHERS[QUERY]}))
    ) is None  # fmt: skip
    assert not torch.equal(rows(rig.plane, QUERY), OTHERS[QUERY])
    assert rig.plane.load_weights() is None
    assert torch.equal(rows(rig.plane, QUERY), OTHERS[QUERY])
    rig.plane.settle_weights(True)
    trainer = trainers(OTHERS[NORM])
    join(rig, trainer)
    take(rig.plane, announced(NORM))
    assert torch.equal(rows(rig.plane, NORM), OTHERS[NORM])
    assert rig.generate(1, "a", PROMPT, 3)


def test_a_checkpoint_is_read_once_the_old_weights_are_gone(discarding, checkpoint, tmp_path):
    rig, directory = discarding, checkpoint("llama")[1]
    before = rig.generate(1, "a", PROMPT, 6)
    take(rig.plane, DiskWeights(str(directory)))
    assert rig.generate(2, "b", PROMPT, 6) == before
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 65}))
    # What is refused before gives nothing up.
    assert rig.plane.open_weights(DiskWeights(str(tmp_path))) is not None
    assert rig.generate(3, "c", PROMPT, 6) == before
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    del tensors[NORM]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    assert rig.plane.open_weights(DiskWeights(str(tmp_path))) is None
    assert f"lacks the tensor {NORM}" in rig.plane.load_weights()
    rig.plane.settle_weights(False)
    with pytest.raises(InvariantError, match="the weights were discarded"):
        rig.plane.open_weights(DiskWeights(str(directory)))


class Updates(RuleBasedStateMachine):
    """Whatever is sent, refused, let go or taken, a rank's part of a weight is what was taken last.

    Two ranks of one model, asked the same: where one of them may not go on, neither does.
    """

    directory = None

    @initialize()
    def start(self):
        self.members = [seated(self.directory, index, 2) for index in range(2)]
        self.model = safetensors.torch.load_file(self.directory / "model.safetensors")
        self.drawn = 0

    def new(self, name):
        self.drawn += 1
        generator = torch.Generator().manual_seed(self.drawn)
        return torch.randn(self.model[name].shape, generator=generator)

    @rule(
        names=st.sets(st.sampled_from(sorted(OTHERS)), min_size=1, max_size=4), taken=st.booleans()
    )
    def update(self, names, taken):
        tensors = {name: self.new(name) for name in sorted(names)}
        update = TensorWeights(safetensors.torch.save(tensors))
        for member in self.members:
            assert member.open(update) is None
        for member in self.members:
            assert member.load() is None
        for member in self.members:
            member.settle(taken)
        if taken:
            self.model |= tensors

    @rule(name=st.sampled_from(sorted(OTHERS)))
    def misshapen(self, name):
        tensors = {NORM: self.new(NORM), name: self.new(name)[1:].clone()}
        for member in self.members:
            assert member.open(TensorWeights(safetensors.torch.save(tensors))) is not None
            member.settle(False)

    @rule()
    def sleep(self):
        for member in self.members:
            member.store.offload()
            assert member.open(TensorWeights(b"")) is not None
            member.settle(False)
            member.store.restore()

    @rule(name=st.sampled_from(sorted(OTHERS)), count=st.integers(1, 330))
    def told(self, name, count):
        assert torch.equal(together(self.members, name, count), self.model[name][:count])

    def teardown(self):
        for name, tensor in self.model.items() if hasattr(self, "model") else ():
            assert torch.equal(together(self.members, name, 1000), tensor), name


def test_any_order_of_updates_leaves_what_was_taken(checkpoint):
    Updates.directory = checkpoint("llama")[1]
    run_state_machine_as_test(
        Updates, settings=settings(max_examples=10, stateful_step_count=12, deadline=None)
    )
