"""Opening a checkpoint: what it says of its model, and where its weights come from."""

from msgspec import Struct

from drumline.core.gguf_file import read_gguf
from drumline.core.model_files import ModelFiles, ModelFormat, read_json
from drumline.device.models.config import DecoderConfig, from_gguf, from_json
from drumline.device.models.matrices import all_matrices
from drumline.device.models.shard import shard_of
from drumline.device.weights.gguf import GgufWeights
from drumline.device.weights.safetensors import SafetensorsWeights
from drumline.device.weights.source import WeightSource


class Checkpoint(Struct, frozen=True, eq=False):
    """An opened checkpoint. No tensor has been read yet."""

    config: DecoderConfig
    weights: WeightSource


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Open a model's files.

    Raises ConfigError naming the file that is missing, unreadable or cut short, or whose
    matrices do not have the sizes it claims, or what in it is not supported.
    """
    if files.format is ModelFormat.GGUF:
        file = read_gguf(files.path)
        config = from_gguf(file)
        weights = GgufWeights(file, heads=config.heads, kv_heads=config.kv_heads)
        _check_shapes(config, weights)
        return Checkpoint(config, weights)
    path = files.path / "config.json"
    generation = files.path / "generation_config.json"
    config = from_json(path, read_json(path), read_json(generation) if generation.is_file() else {})
    tensors = SafetensorsWeights(files.path)
    _check_shapes(config, tensors)
    return Checkpoint(config, tensors)


def _check_shapes(config: DecoderConfig, weights: SafetensorsWeights | GgufWeights) -> None:
    """Hold the sizes that files claim to the tensors in them, before memory is counted by them."""
    for parts in all_matrices(config, shard_of(config)):
        for part in parts:
            weights.check(f"{part.name}.weight", part.cut.stored(part.shape))
