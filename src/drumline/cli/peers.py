"""Flags of other engines that drumline does not take, and what to say instead.

Spellings that mean the same here are aliases of a field, in `core.config`; this is
about the rest.
"""

_NO_STAGES = "there are no pipeline stages and no expert-parallel ranks in this version"
_CHECKPOINT = "leave it out, the checkpoint says it"

EQUIVALENTS: dict[str, str] = {
    # vLLM
    "--num-gpu-blocks-override": "set the pool in tokens with --max-total-tokens",
    "--pipeline-parallel-size": _NO_STAGES,
    "-pp": _NO_STAGES,
    "-tp": "use --tensor-parallel-size",
    "-dp": "use --data-parallel-size",
    "--enable-expert-parallel": _NO_STAGES,
    "--uvicorn-log-level": "use --log-level",
    "--load-format": _CHECKPOINT,
    "--quantization": _CHECKPOINT,
    "-q": _CHECKPOINT,
    "--tokenizer": "the tokenizer is the checkpoint's own",
    "--tokenizer-mode": "the tokenizer is the checkpoint's own",
    "--swap-space": "use --retraction-snapshot-host-gb",
    "--cpu-offload-gb": "weights stay where they are computed; host memory can hold KV pages, "
    "see --enable-kvstore",
    "--generation-config": _CHECKPOINT,
    # SGLang
    "--ep-size": _NO_STAGES,
    "--pp-size": _NO_STAGES,
    "--tokenizer-path": "the tokenizer is the checkpoint's own",
    "--max-prefill-tokens": "use --chunked-prefill-size",
    "--device": "the device is found by itself",
    "--watchdog-timeout": "use --startup-timeout for the start-up",
    # TokenSpeed
    "--world-size": "leave it out, it is --tensor-parallel-size times --data-parallel-size",
    "--control-port": "leave it out, there is one port: --port",
    "--gateway-startup-timeout": "use --startup-timeout",
    "--ext-yaml": "use --config with a TOML file",
    # llama.cpp
    "-m": "use --model",
    "-c": "use --max-model-len",
    "--ctx-size": "use --max-model-len",
    "-n": "use --max-tokens",
    "--n-predict": "use --max-tokens",
    "-np": "use --max-num-seqs",
    "--parallel": "use --max-num-seqs",
    "-b": "use --chunked-prefill-size",
    "--batch-size": "use --chunked-prefill-size",
    "--threads": "set the variable OMP_NUM_THREADS",
    "-t": "set the variable OMP_NUM_THREADS",
    "--temp": "use --temperature",
    "--alias": "use --served-model-name",
    "-p": "give the prompt without a flag",
    "--prompt": "give the prompt without a flag",
}

IGNORED: dict[str, str] = {
    "--enable-metrics": "metrics are always on, see /metrics",
    "--enforce-eager": "there are no graphs to capture on a CPU",
    "--enable-chunked-prefill": "prompts are always prefilled in chunks",
}
"""Switches that ask for what is so anyway: taken, with a note."""
