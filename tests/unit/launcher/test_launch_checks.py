"""What cannot be is refused before a process starts, by its flag and with the reason."""

import json

import pytest

from drumline.core.config import CacheConfig, Config, ModelConfig, ParallelConfig, ScheduleConfig
from drumline.core.errors import ConfigError
from drumline.core.model_files import find_model
from drumline.launcher.checks import check, check_ranks, decoder_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return find_model(str(tmp_path))


def refusal(config: Config, files) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config, files)
    return str(caught.value)


def test_what_the_model_can_do_passes(model):
    check(Config(), model)
    check(Config(model=ModelConfig(max_model_len=512)), model)
    check(Config(parallel=ParallelConfig(tensor_parallel_size=4)), model)


def test_a_context_beyond_the_models_is_refused(model):
    told = refusal(Config(model=ModelConfig(max_model_len=513)), model)
    assert told == "--max-model-len: 513 is beyond the model's context of 512 tokens"


def test_a_prefix_page_that_is_no_multiple_of_the_devices_is_refused(model):
    told = refusal(Config(cache=CacheConfig(prefix_granularity=24)), model)
    assert told == "--prefix-granularity: 24 is no multiple of the device page of 16 tokens"


def test_more_ranks_than_heads_are_refused(model):
    told = refusal(Config(parallel=ParallelConfig(tensor_parallel_size=5)), model)
    assert told.startswith("--tensor-parallel-size: 5 ranks cannot share the model's 4 attention")


def test_a_pipeline_says_that_it_has_forwards_in_flight_whatever_is_asked(model, caplog):
    alone = ScheduleConfig(overlap_schedule=False)
    check(Config(schedule=alone), model)
    check(Config(parallel=ParallelConfig(pipeline_parallel_size=2)), model)
    assert not caplog.records
    check(Config(parallel=ParallelConfig(pipeline_parallel_size=2), schedule=alone), model)
    (record,) = caplog.records
    assert "--disable-overlap-schedule says nothing of a pipeline: 2 forwards" in record.message


def test_more_stages_than_layers_are_refused(model):
    told = refusal(Config(parallel=ParallelConfig(pipeline_parallel_size=9)), model)
    assert told.startswith("--pipeline-parallel-size: 9 stages cannot share the model's ")


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (
            {"pipeline_parallel_size": 9, "data_parallel_size": 3, "tensor_parallel_size": 2},
            "--pipeline-parallel-size: 9 times --data-parallel-size 3 times "
            "--tensor-parallel-size 2 are 54 ranks",
        ),
        (
            {"tensor_parallel_size": 2**30},
            "--tensor-parallel-size: 1073741824 times --data-parallel-size 1 are 1073741824 ranks; "
            "this machine has 2 processor cores, which run at most 16",
        ),
        (
            {"data_parallel_size": 17, "nprocs_per_node": 17},
            "--data-parallel-size: 17 times --tensor-parallel-size 1 are 17 ranks",
        ),
        (
            {"data_parallel_size": 9, "tensor_parallel_size": 2},
            "--data-parallel-size: 9 times --tensor-parallel-size 2 are 18 ranks",
        ),
    ],
)
def test_more_ranks_than_the_processor_runs_are_refused(parallel, told):
    with pytest.raises(ConfigError) as caught:
        check_ranks(ParallelConfig(**parallel), cores=2)
    assert str(caught.value).startswith(told)


def test_as_many_ranks_as_the_processor_runs_pass():
    check_ranks(ParallelConfig(data_parallel_size=16), cores=2)


def test_an_architecture_that_is_not_served_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    told = refusal(Config(), find_model(str(tmp_path)))
    assert "'MambaForCausalLM' is not supported" in told


def test_a_gguf_file_is_judged_by_its_metadata():
    decoder = decoder_of(find_model(None))
    assert (decoder.heads, decoder.max_positions) == (9, 8192)
