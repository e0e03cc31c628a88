"""What the operator asked for that cannot be, found before any process starts.

It reads the head of the checkpoint (config.json, or a GGUF file's metadata) and holds
it against the configuration. A rank would find the same, but only once it has imported
what it computes with. Memory is left to the rank: how much there is, it knows best.
"""

import logging
import os

from drumline.core.config import Config, ParallelConfig
from drumline.core.errors import ConfigError
from drumline.core.gguf_file import read_gguf
from drumline.core.model_files import ModelFiles, ModelFormat, read_json
from drumline.device.models.config import DecoderConfig, context_tokens, from_gguf, from_json
from drumline.device.page import check_granularity
from drumline.frontend.text.chat_template import ChatTemplate, given_template
from drumline.launcher.nodes import check_nodes

_log = logging.getLogger(__name__)

RANKS_A_CORE = 8
"""More ranks than that on one processor core would only wait for each other."""


def check(config: Config, files: ModelFiles) -> DecoderConfig:
    """Return what the checkpoint says of its model.

    Raises ConfigError naming the flag, or the file, for which there is no engine.
    """
    check_ranks(config.parallel, os.cpu_count() or 1)
    check_nodes(config)
    decoder = decoder_of(files)
    check_model(config, decoder)
    stages = config.parallel.pipeline_parallel_size
    if stages > 1 and not config.schedule.overlap_schedule:
        _log.warning(
            "--disable-overlap-schedule says nothing of a pipeline: %d forwards are in flight, as "
            "many as --pipeline-parallel-size has stages",
            config.in_flight_depth,
        )
    if config.chat.chat_template is not None:
        ChatTemplate(given_template(config.chat.chat_template), bos_token="", eos_token="")
    return decoder


def warn_of_strange_ids(tokenizer_ids: int, model_ids: int) -> None:
    """Log that a tokenizer has ids that the model has no vectors for, if it has some.

    It is no error: checkpoints that add tokens which no prompt needs are served all the same.
    """
    if tokenizer_ids > model_ids:
        _log.warning(
            "the tokenizer has %d ids, the model's vocabulary %d: prompts with an id of %d or more "
            "cannot be served, so the tokenizer may be another model's",
            tokenizer_ids,
            model_ids,
            model_ids,
        )


def check_ranks(parallel: ParallelConfig, cores: int) -> None:
    """Raise ConfigError for more ranks than this machine can run in step."""
    ranks, most = parallel.local_ranks, RANKS_A_CORE * cores
    if ranks <= most:
        return
    if parallel.nodes > 1:
        raise ConfigError(
            "--nnodes",
            f"{ranks} ranks fall on this machine; its {cores} processor cores run at most {most}",
        )
    sizes = {
        "--tensor-parallel-size": parallel.tensor_parallel_size,
        "--data-parallel-size": parallel.data_parallel_size,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size,
    }
    largest, *others = sorted(sizes, key=sizes.__getitem__, reverse=True)
    times = " times ".join(
        f"{other} {sizes[other]}"
        for place, other in enumerate(others)
        if not place or sizes[other] > 1
    )
    raise ConfigError(
        largest,
        f"{sizes[largest]} times {times} are {ranks} ranks; this machine has "
        f"{cores} processor cores, which run at most {most}",
    )


def check_model(config: Config, model: DecoderConfig) -> None:
    """Raise ConfigError for what this model cannot do."""
    context_tokens(config.model.max_model_len, model)
    check_granularity(config.cache.prefix_granularity)
    stages = config.parallel.pipeline_parallel_size
    if stages > model.layers:
        raise ConfigError(
            "--pipeline-parallel-size",
            f"{stages} stages cannot share the model's {model.layers} layers; at most one a layer",
        )
    size = config.parallel.tensor_parallel_size
    if size > model.heads:
        raise ConfigError(
            "--tensor-parallel-size",
            f"{size} ranks cannot share the model's {model.heads} attention heads; "
            "at most one a head",
        )


def decoder_of(files: ModelFiles) -> DecoderConfig:
    """Return what a checkpoint says of its model. Raises ConfigError naming the file."""
    if files.format is ModelFormat.GGUF:
        return from_gguf(read_gguf(files.path))
    path = files.path / "config.json"
    generation = files.path / "generation_config.json"
    return from_json(path, read_json(path), read_json(generation) if generation.is_file() else {})
