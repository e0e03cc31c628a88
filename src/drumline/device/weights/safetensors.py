"""The tensors of a directory of safetensors files, sharded or not."""

from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.core.model_files import read_json
from drumline.device.weights.source import Cut, StoredBlocks, stored_shape

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsWeights:
    """The tensors of the safetensors files in a directory."""

    __slots__ = ("_directory", "_files", "_places")

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        if (directory / _INDEX).is_file():
            self._open_shards()
        elif (directory / _SINGLE).is_file():
            self._places = dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        else:
            raise ConfigError("--model", _nothing_to_read(directory))

    def has(self, name: str) -> bool:
        return name in self._places

    def blocks(
        self, _name: str, _shape: tuple[int, int], _cut: Cut | None = None
    ) -> StoredBlocks | None:
        return None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError naming the file unless it says it holds `name` in this shape."""
        self._stored(name, shape)

    def read(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        stored = self._stored(name, stored_shape(out, cut))
        path = self._directory / self._places[name]
        try:
            tensor = _part(stored, cut)
        except SafetensorError as error:
            raise ConfigError(str(path), f"tensor {name} cannot be read: {error}") from error
        if not tensor.is_floating_point():
            raise ConfigError(str(path), f"tensor {name} holds {tensor.dtype}, expected floats")
        out.copy_(tensor)

    def _stored(self, name: str, expected: tuple[int, ...]) -> Any:
        """Return a tensor of a shape, of which nothing is read yet."""
        place = self._places.get(name)
        if place is None:
            raise ConfigError(str(self._directory), f"lacks the tensor {name} of shape {expected}")
        path = self._directory / place
        try:
            stored = self._files[place].get_slice(name)
            shape = tuple(stored.get_shape())
        except SafetensorError as error:
            raise ConfigError(str(path), f"tensor {name} cannot be read: {error}") from error
        if shape != expected:
            raise ConfigError(
                str(path), f"tensor {name} has shape {shape}; config.json makes it {expected}"
            )
        return stored

    def _open_shards(self) -> None:
        index = self._directory / _INDEX
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ConfigError(str(index), "holds no weight_map from tensor to file")
        for place in sorted(set(map(str, places.values()))):
            if Path(place).name != place:
                raise ConfigError(str(index), f"names {place!r}, which is no file of its directory")
            held = set(self._open(place).keys())
            expected = {name for name, file in places.items() if file == place}
            if missing := sorted(expected - held):
                raise ConfigError(
                    str(self._directory / place),
                    f"lacks the tensor {missing[0]}, which {_INDEX} places there",
                )
        self._places = places

    def _open(self, place: str) -> Any:
        path = self._directory / place
        try:
            if not path.is_file():
                raise ConfigError(str(path), f"is missing; {_INDEX} names it")
            self._files[place] = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(str(path), f"is truncated or no safetensors file: {error}") from error
        return self._files[place]


def _part(stored: Any, cut: Cut | None) -> Tensor:
    """Return what is asked for of a stored tensor; only that is read."""
    if cut is None:
        return cast("Tensor", stored[:])
    wanted = slice(cut.span.start, cut.span.stop)
    return cast("Tensor", stored[wanted] if cut.dim == 0 else stored[:, wanted])


def _nothing_to_read(directory: Path) -> str:
    pickled = sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pt*"))
    if pickled:
        return (
            f"{directory} holds pickled weights ({pickled[0].name}), which can run any code and "
            "are not read; convert them to safetensors"
        )
    return f"{directory} holds neither {_SINGLE} nor {_INDEX}"
