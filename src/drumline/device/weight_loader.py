"""Loading a model's weights: those a rank starts with, and others of the same shape later.

Each set is read into memory of its own. It does not know which of them serve.

Thread: forward thread only.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from msgspec import Struct, structs

from drumline.contract.weights import DiskWeights
from drumline.core.errors import ConfigError
from drumline.core.model_files import find_model
from drumline.device.blocks import Apportioned
from drumline.device.layers import Backend
from drumline.device.models.checkpoint import Checkpoint, open_checkpoint
from drumline.device.models.config import DecoderConfig
from drumline.device.models.decoder import Decoder, weight_count
from drumline.device.models.loading import load_decoder
from drumline.device.models.matrices import EMBEDDING, HEAD, all_matrices, stored
from drumline.device.models.shard import Shard
from drumline.device.native_linear import PackedRows, packed_bytes
from drumline.device.parallel import TensorGroup
from drumline.device.weights.gguf import ROPE_FACTORS
from drumline.device.weights.places import Noted, Place
from drumline.device.weights.store import WeightStore

_EMBEDDING, _HEAD = f"{EMBEDDING}.weight", f"{HEAD}.weight"
_NORM = "model.norm.weight"
_MANY_WEIGHTS = 1_000_000_000
_MIB = 1 << 20
_MAY_DIFFER = frozenset({"architecture", "stored_dtype", "eos_token_ids"})
"""What two checkpoints of one model may say differently: file formats have their own names
for it, weights are converted anyway, and which tokens end an answer is settled when an
engine starts."""
_ROUNDED = 1e-6
"""File formats hold numbers in more bits or fewer."""


class Loaded(Struct, frozen=True, eq=False):
    """A decoder, the memory its weights lie in, and where each of them does, by name."""

    decoder: Decoder
    store: WeightStore
    places: dict[str, Place]
    elsewhere: frozenset[str]
    """Weights of the model that other stages have, and this one has not."""
    packed: dict[str, PackedRows]
    """The weights that stayed small integers, which are read and not written."""


class WeightLoader:
    """Loads this rank's part of a model."""

    def __init__(
        self,
        config: DecoderConfig,
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorGroup,
        apportioned: Apportioned,
        available_bytes: Callable[[], int],
        shard: Shard,
    ) -> None:
        self._config = config
        self._backend = backend
        self._dtype = dtype
        self._device = device
        self._group = group
        self._apportioned = apportioned
        self._available_bytes = available_bytes
        self._shard = shard
        self._count = weight_count(config, shard)

    def bytes_of(self, checkpoint: Checkpoint) -> int:
        """Return how much memory this rank's part of a checkpoint takes."""
        itemsize, machine = self._dtype.itemsize, self._backend.machine
        size = self._count * itemsize
        if machine is None or not self._backend.packs:
            return size
        for parts in all_matrices(self._config, self._shard):
            if (held := stored(checkpoint.weights, parts)) is not None:
                size += packed_bytes(machine, held)
                size -= sum(math.prod(part.shape) for part in parts) * itemsize
        return size

    def load(self, checkpoint: Checkpoint) -> Loaded:
        """Read the weights. Raises ConfigError naming the file of what is missing or misshapen."""
        store = WeightStore(self._dtype, self._device)
        source = Noted(checkpoint.weights)
        with _threads(self._count):
            decoder, packed = load_decoder(
                self._config,
                source,
                self._backend,
                store,
                self._group,
                self._apportioned,
                self._shard,
            )
        places = source.places
        # No weight, but what goes into a table that is made of it.
        places.pop(ROPE_FACTORS, None)
        if self._config.tied_embeddings:
            if _EMBEDDING in packed:
                packed[_HEAD] = packed[_EMBEDDING]
            elif _EMBEDDING in places:
                places[_HEAD] = places[_EMBEDDING]
        elsewhere = self._named({*places, *packed})
        return Loaded(decoder, store, places, elsewhere, packed)

    def _named(self, own: set[str]) -> frozenset[str]:
        """Return the names of the weights that other stages have, given this one's.

        One layer has what every other has.
        """
        layers = self._shard.layers
        first = f"model.layers.{layers.start}."
        parts = [name.removeprefix(first) for name in own if name.startswith(first)]
        named = {f"model.layers.{layer}.{part}" for layer in range(layers.whole) for part in parts}
        return frozenset((named | {_EMBEDDING, _NORM, _HEAD}) - own)

    def opened(self, source: DiskWeights, *, beside: bool) -> Checkpoint:
        """Open a checkpoint that is to take the place of the one that serves.

        Raises ConfigError where it is none of the same shape, or where memory for both is wanting
        though one is to be loaded `beside` the other.
        """
        checkpoint = open_checkpoint(find_model(source.path))
        mine, others = structs.asdict(self._config), structs.asdict(checkpoint.config)
        for name, value in mine.items():
            if name not in _MAY_DIFFER and not _same(value, others[name]):
                raise ConfigError(
                    source.path, f"{name} is {others[name]} there, and {value} in what is served"
                )
        if beside:
            self.check_room(source.path, self.bytes_of(checkpoint))
        return checkpoint

    def check_room(self, what: str, needed: int) -> None:
        """Raise ConfigError unless so many bytes are available beside the weights that serve."""
        free = self._available_bytes()
        if needed > free:
            raise ConfigError(
                what,
                f"the weights that serve are kept until the new ones are there, which take "
                f"{needed // _MIB} MiB; {free // _MIB} MiB are available",
            )


def _same(mine: object, other: object) -> bool:
    if isinstance(mine, float) and isinstance(other, float):
        return math.isclose(mine, other, rel_tol=_ROUNDED)
    return mine == other


@contextmanager
def _threads(weights: int) -> Iterator[None]:
    """Read a small model with one thread.

    Reading is thousands of short operations. Shared among threads, each ends in a
    barrier, which costs milliseconds wherever another process holds one of the cores.
    """
    threads = torch.get_num_threads()
    if weights < _MANY_WEIGHTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
