"""The embedded model's weights in the forms that peers read, made once of its 4-bit file.

Every engine then computes the same function up to its own rounding, so that none is quicker for
being another model.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from benchmarks.peers.engine import PeerFailed
from benchmarks.peers.place import Place
from drumline.core.model_files import find_model

_HEAD = "token_embd.weight"


def embedded() -> Path:
    """Return the file that drumline serves when no model is named."""
    return find_model(None).path


def gguf_file(place: Place, model: str) -> Path:
    """Return a GGUF file of a form: `embedded`, `q4_0`, `f16` or `bf16`. Raises PeerFailed."""
    if model == "embedded":
        return embedded()
    if model not in _TYPES:
        raise PeerFailed(f"there is no form {model!r} of the model")
    path = place.home / "models" / f"{embedded().stem}.{model}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as made:
            part = Path(made) / path.name
            write_as(_TYPES[model], embedded(), part)
            part.rename(path)
    return path


_TYPES = {"q4_0": Type.Q4_0, "f16": Type.F16, "bf16": Type.BF16}


def write_as(type_: Type, file: Path, path: Path) -> None:
    """Write the model of a GGUF file to `path` with its matrices in another type."""
    source = gguf.GGUFReader(file)
    architecture = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in source.tensors:
        # The head stays in 8 bits beside 4-bit layers, as quantizers leave it.
        kept = len(tensor.shape) == 1 or (type_ is Type.Q4_0 and tensor.name == _HEAD)
        if kept:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        floats = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, quantize(floats, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hugging_face(place: Place) -> Path:
    """Return a directory with the weights in bfloat16, for engines that read no GGUF."""
    path = place.home / "models" / f"{embedded().stem}.hf"
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as made:
            part = Path(made) / path.name
            part.mkdir()
            # In a process of its own, as it brings torch along, which the harness need not hold.
            command = [sys.executable, "-c", _CONVERSION, str(embedded()), str(part)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_CONVERSION_S, check=False
            )
            if done.returncode:
                raise PeerFailed(f"its weights cannot be made: {done.stderr.strip()[-300:]}")
            part.rename(path)
    return path


_CONVERSION_S = 600.0
_CONVERSION = """
import sys
from pathlib import Path

import torch
import transformers

from drumline.core.gguf_file import read_gguf
from drumline.device.models.config import from_gguf
from drumline.device.weights.gguf import GgufWeights
from drumline.frontend.text.gguf_tokenizer import gguf_tokenizer

file = read_gguf(Path(sys.argv[1]))
said = from_gguf(file)
config = transformers.LlamaConfig(
    vocab_size=said.vocab_size,
    hidden_size=file.metadata["llama.embedding_length"],
    intermediate_size=file.metadata["llama.feed_forward_length"],
    num_hidden_layers=said.layers,
    num_attention_heads=said.heads,
    num_key_value_heads=said.kv_heads,
    max_position_embeddings=file.metadata["llama.context_length"],
    rms_norm_eps=file.metadata["llama.attention.layer_norm_rms_epsilon"],
    rope_parameters={"rope_type": "default", "rope_theta": file.metadata["llama.rope.freq_base"]},
    tie_word_embeddings=True,
)
model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
weights = GgufWeights(file, heads=said.heads, kv_heads=said.kv_heads)
for name, parameter in model.named_parameters():
    weights.read(name, parameter.data)
model.save_pretrained(sys.argv[2])
gguf_tokenizer(file).write(Path(sys.argv[2]))
"""
