"""What a model's configuration says is understood, or refused by file and key."""

from pathlib import Path

import pytest

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import GgufFile, TensorEntry, TensorType
from drumline.device.models.config import from_gguf, from_json
from drumline.device.weights.gguf import GgufWeights

JSON = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 0,
    "layer_types": None,
    "quantization_config": None,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "rope_scaling": None,
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 112,
    "llama.context_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 16,
    "llama.attention.sliding_window": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 5000.0,
    "llama.rope.dimension_count": 16,
    "llama.rope.scaling.type": "linear",
    "llama.rope.scaling.factor": 2.0,
    "tokenizer.ggml.eos_token_id": 2,
    "split.count": 1,
}
ODD = [
    None, True, -1, 0, 2**62, 10**30, float("nan"), float("inf"), -1.5, "x", "", [], [1], [None],
    {}, {"a": 1},
]  # fmt: skip
PATH = Path("model/config.json")


def understood_or_refused(read, path, at):
    refused = None
    try:
        read()
    except ConfigError as error:
        refused = error
    assert refused is None or refused.setting == str(path), at
    assert refused is None or len(refused.reason) < 300, at


def test_odd_values_in_config_json_are_read_or_refused_by_file():
    from_json(PATH, JSON, {})
    for key in JSON:
        for value in ODD:
            odd = {**JSON, key: value}
            understood_or_refused(lambda odd=odd: from_json(PATH, odd, {}), PATH, (key, value))
    for key in JSON["rope_parameters"]:
        for value in ODD:
            odd = {**JSON, "rope_parameters": {**JSON["rope_parameters"], key: value}}
            understood_or_refused(lambda odd=odd: from_json(PATH, odd, {}), PATH, (key, value))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("architectures", True, "architecture"),
        ("num_hidden_layers", 2**40, "num_hidden_layers from 1 to"),
        ("max_position_embeddings", 2**62, "max_position_embeddings from 1 to"),
        ("rms_norm_eps", "x", "rms_norm_eps"),
        ("rms_norm_eps", -1.0, "rms_norm_eps"),
        ("rope_parameters", 3, "rope_parameters"),
        ("quantization_config", True, "quantization_config"),
        ("layer_types", 3, "layer_types"),
        ("max_window_layers", "x", "max_window_layers"),
        ("tie_word_embeddings", "false", "tie_word_embeddings to be true or false, has 'false'"),
        ("attention_bias", 1, "attention_bias to be true or false"),
        ("eos_token_id", True, "eos_token_id to be a token id or a list of them, has True"),
        ("eos_token_id", [2, None], "eos_token_id"),
        (
            "rope_parameters",
            {**JSON["rope_parameters"], "high_freq_factor": 1.0},
            "high_freq_factor above the low_freq_factor of 1.0, has 1.0",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_key(key, value, said):
    with pytest.raises(ConfigError, match=said):
        from_json(PATH, {**JSON, key: value}, {})


def test_odd_values_in_gguf_metadata_are_read_or_refused_by_file():
    embedding = TensorEntry("token_embd.weight", TensorType.F32, (320, 64), 0, 81920)
    path = Path(__file__)

    def read(metadata):
        file = GgufFile(path, metadata, {embedding.name: embedding})
        config = from_gguf(file)
        GgufWeights(file, heads=config.heads, kv_heads=config.kv_heads)

    read(GGUF)
    for key in GGUF:
        for value in ODD:
            odd = {**GGUF, key: value}
            understood_or_refused(lambda odd=odd: read(odd), path, (key, value))


def test_the_file_that_names_wrong_ends_is_the_one_that_is_told_of():
    with pytest.raises(ConfigError, match=r"model/generation_config\.json: .*has 'x'"):
        from_json(PATH, JSON, {"eos_token_id": "x"})


def test_an_epsilon_of_zero_is_one():
    assert from_json(PATH, {**JSON, "rms_norm_eps": 0}, {}).norm_eps == 0


@pytest.mark.parametrize("rows", [0, 2**40])
def test_embeddings_of_no_vocabulary_are_refused(rows):
    embedding = TensorEntry("token_embd.weight", TensorType.F32, (rows, 64), 0, 0)
    with pytest.raises(ConfigError, match=r"token_embd\.weight has shape"):
        from_gguf(GgufFile(PATH, GGUF, {embedding.name: embedding}))
