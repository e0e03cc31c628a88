"""The weights that serve, and how others take their place, in whole or in part.

An update is opened (which changes nothing), loaded, and settled once all ranks know whether
it is taken. It is loaded beside what serves, or, where that is to be discarded, over it; then
what serves is of no use once a load has begun, unless it ends well on every rank.

Thread: forward thread only.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.ports import Clock
from drumline.contract.weights import (
    DiskWeights,
    NewWeights,
    SentWeights,
    TensorWeights,
    WeightGroup,
    WeightRows,
)
from drumline.core.errors import ConfigError, InvariantError, PeerError
from drumline.device.executor import Executor
from drumline.device.models.checkpoint import Checkpoint
from drumline.device.trainer_group import Meeting, TrainerGroup, why_unfit
from drumline.device.weight_loader import Loaded, WeightLoader
from drumline.device.weights.places import Place
from drumline.device.weights.store import WeightStore
from drumline.device.weights.tensors import TensorsRefusedError, read_tensors

_RELEASED = "the weights are released; call resume_memory_occupation first"
_FLOATS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_MOST_VALUES = 1 << 20
"""Of a weight that is shown: some megabytes of text."""


class RefusedError(Exception):
    """Why weights cannot be taken; never leaves this module."""


class _Tensors(Struct, frozen=True, eq=False):
    """An opened update of tensors that are here."""

    tensors: dict[str, Tensor]


class _Staged(Struct, frozen=True, eq=False):
    """A loaded update: what is to be written over what, and which weights that is."""

    writes: list[tuple[Tensor, Tensor]]
    places: list[Place]


class ServingWeights:
    """A model's weights in the executor that computes with them."""

    def __init__(
        self,
        loaded: Loaded,
        loader: WeightLoader,
        executor: Executor,
        clock: Clock,
        *,
        discards: bool,
        timeout_s: float,
    ) -> None:
        """`timeout_s` is for how long a trainer is waited for, at a time."""
        self._serving: Loaded | None = loaded
        self._loader = loader
        self._executor = executor
        self._clock = clock
        self._discards = discards
        self._timeout_s = timeout_s
        self._groups: dict[str, TrainerGroup] = {}
        self._meeting: Meeting | None = None
        """Of the group that is to be joined next."""
        self._opened: Checkpoint | _Tensors | SentWeights | None = None
        self._new: Loaded | _Staged | None = None
        self._received_from: str | None = None
        """The group that sent what is loaded."""
        self._absent: set[str] = set()
        """The weights that were not loaded since all were dropped."""

    @property
    def store(self) -> WeightStore:
        """The memory of what serves."""
        return self._live.store

    def open(self, source: NewWeights) -> str | None:
        """Make sure that an update can be loaded, and load none; returns why it cannot."""
        if self.store.away:
            return _RELEASED
        try:
            self._opened = self._checked(source)
        except (RefusedError, ConfigError, TensorsRefusedError) as error:
            return str(error)
        return None

    @torch.inference_mode()
    def load(self) -> str | None:
        """Load what was opened; returns why it cannot be."""
        opened, self._opened = self._opened, None
        try:
            match opened:
                case Checkpoint():
                    if self._discards:
                        self._executor.let_go()
                        self._serving = None
                    self._new = self._loader.load(opened)
                case _Tensors(tensors=tensors):
                    self._new = self._staged(tensors.items())
                case SentWeights(group=group):
                    self._received_from = group
                    self._new = self._staged(self._received(opened))
                case None:
                    raise InvariantError("weights are loaded that were not opened")
        except (RefusedError, ConfigError) as error:
            return str(error)
        return None

    @torch.inference_mode()
    def settle(self, taken: bool) -> None:
        """Serve what was loaded, or let go what was opened and loaded."""
        new, self._new, self._opened = self._new, None, None
        group, self._received_from = self._received_from, None
        if not taken:
            if group is not None:
                # Some members may have received what others did not: they are not in step any more.
                self.leave(group)
            return
        match new:
            case Loaded():
                self._executor.replace(new.decoder)
                self._serving = new
                self._absent.clear()
            case _Staged(writes=writes, places=places):
                for place, tensor in writes:
                    place.copy_(tensor)
                self._came(places)
            case None:
                raise InvariantError("weights are taken that were not loaded")

    def drop(self) -> None:
        """Give the memory back and keep no weight; their places stay, for others to come."""
        live = self._live
        self._executor.forget()
        live.store.drop()
        self._absent = {*live.places, *live.packed}

    def absent(self) -> str | None:
        """Return a weight that was not loaded since all were dropped, if there is one."""
        return min(self._absent, default=None)

    def _came(self, places: Iterable[Place]) -> None:
        """Note which weights were loaded; one may have two names."""
        if self._absent:
            filled = set(map(id, places))
            known = self._live.places
            self._absent = {
                name for name in self._absent if name not in known or id(known[name]) not in filled
            }

    def open_group(self, group: WeightGroup) -> str | None:
        """Make sure that this rank can join a trainer's group, and join none; returns why not.

        Waits until the trainer is there, for as long as its group may take to meet.
        """
        self._meeting = None
        if group.name in self._groups:
            return f"there is a group {group.name} already; destroy it first"
        if (why := why_unfit(group.backend, self.store.device)) is not None:
            return why
        meeting = Meeting(group, self._timeout_s, self._clock)
        try:
            meeting.await_listener()
        except PeerError as error:
            return str(error)
        self._meeting = meeting
        return None

    def join(self) -> str | None:
        """Become a member of the group that was opened; returns why not.

        Collective: every member of the group.
        """
        meeting, self._meeting = self._meeting, None
        if meeting is None:
            raise InvariantError("a trainer's group is joined that was not opened")
        try:
            self._groups[meeting.group.name] = TrainerGroup(meeting, self.store.device)
        except PeerError as error:
            return str(error)
        return None

    def leave(self, name: str) -> None:
        """Be no member of a group any more, if this rank was one."""
        self._groups.pop(name, None)

    def rows(self, name: str, count: int) -> WeightRows | str | None:
        """Return this rank's part of a weight's first rows, or why there is none.

        None where another stage has it.
        """
        if self.store.away:
            return _RELEASED
        if name in self._live.elsewhere:
            return None
        try:
            place = self._live.packed.get(name) or self._place(name)
        except RefusedError as error:
            return str(error)
        if name in self._absent:
            return f"{name} was dropped with all weights, and was not loaded since"
        shape, cut = place.shape, place.cut
        values = min(count, shape[0]) * (shape[1] if len(shape) > 1 else 1)
        if values > _MOST_VALUES:
            return (
                f"{name} has {values} values in so many rows, of its shape {list(shape)}; at most "
                f"{_MOST_VALUES} are told, so ask for fewer with truncate_size"
            )
        first = cut.span.start if cut is not None and cut.dim == 0 else 0
        shown = place.first(max(0, min(count, shape[0]) - first)).contiguous()
        data = shown.cpu().numpy().tobytes()
        if cut is None:
            return WeightRows(shape, data)
        stop = first + len(shown) if cut.dim == 0 else cut.span.stop
        return WeightRows(shape, data, cut.dim, cut.span.start, stop)

    # What an update must be

    @property
    def _live(self) -> Loaded:
        if self._serving is None:
            raise InvariantError("the weights were discarded, and others never came")
        return self._serving

    def _place(self, name: str) -> Place:
        places = self._live.places
        place = places.get(name)
        if name in self._live.packed:
            raise RefusedError(
                f"{name} stays in the small integers that its file has, and floats would have to "
                "be rounded to such; start with --quantization none, or update from a disk"
            )
        if place is None:
            close = difflib.get_close_matches(name, places, 1)
            hint = close[0] if close else next(iter(places))
            raise RefusedError(f"no weight here is called {name}; one is {hint}")
        return place

    def _checked(self, source: NewWeights) -> Checkpoint | _Tensors | SentWeights:
        """Return an update that can be loaded.

        Raises RefusedError, ConfigError or TensorsRefusedError saying why it cannot be.
        """
        match source:
            case DiskWeights():
                return self._loader.opened(source, beside=not self._discards)
            case TensorWeights(data=data):
                tensors = read_tensors(data)
                named = {
                    name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                    for name, tensor in tensors.items()
                }
                self._check("the tensors", named)
                return _Tensors(tensors)
            case SentWeights(group=group, tensors=announced):
                if group not in self._groups:
                    raise RefusedError(
                        f"there is no group {group}; call init_weights_update_group first"
                    )
                self._check(
                    f"group {group}", {each.name: (each.dtype, each.shape) for each in announced}
                )
                return source
        assert_never(source)

    def _check(self, what: str, named: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Raise RefusedError naming the first that does not fit, ConfigError without room."""
        if not named:
            raise RefusedError("no tensor is named; an update has one at least")
        needed = largest = 0
        for name, (dtype, shape) in named.items():
            if dtype not in _FLOATS:
                raise RefusedError(f"{name} is of {dtype}; weights are {', '.join(_FLOATS)}")
            if name in self._live.elsewhere:
                continue
            place = self._place(name)
            if shape != place.shape:
                raise RefusedError(
                    f"{name} has shape {list(shape)}; here it is {list(place.shape)}"
                )
            needed += place.out.nbytes
            largest = max(largest, math.prod(shape) * _FLOATS[dtype].itemsize)
        if not self._discards:
            # One at a time is whole here before this rank's part of it is kept.
            self._loader.check_room(what, needed + largest)

    # How it is loaded

    def _received(self, sent: SentWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a trainer sends. Raises RefusedError once it does not."""
        group = self._groups[sent.group]
        for number, each in enumerate(sent.tensors, 1):
            tensor = _room_for(each.name, each.shape, _FLOATS[each.dtype], group.device)
            try:
                group.receive(tensor)
            except PeerError as error:
                raise RefusedError(
                    f"{each.name}, {number} of {len(sent.tensors)}, did not come, and group "
                    f"{sent.group} is over: {error}"
                ) from error
            yield each.name, tensor

    def _staged(self, tensors: Iterable[tuple[str, Tensor]]) -> _Staged:
        """Keep this rank's parts until they are taken, or write them if nothing is to be kept.

        Raises RefusedError where one weight comes under two names, and is not the same.
        """
        writes: list[tuple[Tensor, Tensor]] = []
        places: list[Place] = []
        written: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in tensors:
            if name in self._live.elsewhere:
                continue  # received all the same, as a trainer sends to all at once
            place = self._place(name)
            out = place.out
            new = out if self._discards else _room_for(name, out.shape, out.dtype, out.device)
            earlier = written.get(id(place))
            part = place.part(tensor)
            if earlier is not None and not torch.equal(part.to(new), earlier[1]):
                raise RefusedError(
                    f"{name} and {earlier[0]} are one weight of this model, and differ"
                )
            new.copy_(part)
            written[id(place)] = name, new
            places.append(place)
            if not self._discards:
                writes.append((place.out, new))
        return _Staged(writes, places)


def _room_for(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of a device for a tensor. Raises RefusedError when there is none left."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    except RuntimeError as error:
        raise RefusedError(f"no memory for {name} of shape {list(shape)}") from error
