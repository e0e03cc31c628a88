"""Flags of other engines that drumline does not take, and what to say instead.

Spellings that mean the same here are aliases of a field, in `core.config`; this is
about the rest. A flag that drumline learns leaves this table.
"""

_NO_EXPERTS = "there are no expert-parallel ranks in this version"
_CHECKPOINT = "leave it out, the checkpoint says it"
_TOKENIZER = "the tokenizer is the checkpoint's own"
_NO_ADAPTERS = "adapters are not loaded; merge them into the checkpoint"
_NO_EMBEDDINGS = "models that only embed are not served"
_NO_DRAFTS = "there is no speculation in this version"
_NO_DISAGGREGATION = "an engine prefills and decodes by itself in this version"
_BY_DEVICE = "leave it out, it follows from the device"
_KV_DTYPE = "use --kv-cache-dtype, which is of keys and values alike"
_LESS_LOG = "use --log-level warning, which silences the lines of requests and batches"
_DRAWN = "leave it out, prompts are drawn at random"
_SIZE = "set the pool in tokens with --max-total-tokens"

EQUIVALENTS: dict[str, str] = {
    # vLLM
    "--num-gpu-blocks-override": _SIZE,
    "--enable-expert-parallel": _NO_EXPERTS,
    "--expert-parallel-size": _NO_EXPERTS,
    "--data-parallel-size-local": "use --nprocs-per-node",
    "--uvicorn-log-level": "use --log-level",
    "--disable-log-requests": _LESS_LOG,
    "--no-enable-log-requests": _LESS_LOG,
    "--disable-log-stats": _LESS_LOG,
    "--load-format": _CHECKPOINT,
    "--revision": "fetch that revision with `hf download` and name its directory as --model",
    "--hf-overrides": "change the checkpoint's config.json",
    "--download-dir": "set the variable HF_HOME",
    "--tokenizer": _TOKENIZER,
    "--tokenizer-mode": _TOKENIZER,
    "--swap-space": "use --retraction-snapshot-host-gb",
    "--cpu-offload-gb": "weights stay where they are computed; host memory can hold KV pages, "
    "see --enable-kvstore",
    "--generation-config": _CHECKPOINT,
    "--attention-backend": _BY_DEVICE,
    "--enable-lora": _NO_ADAPTERS,
    "--lora-modules": _NO_ADAPTERS,
    "--max-loras": _NO_ADAPTERS,
    "--root-path": "let the proxy in front strip its prefix",
    "--speculative-config": _NO_DRAFTS,
    "--kv-transfer-config": _NO_DISAGGREGATION,
    "--structured-outputs-config": "use --grammar-backend",
    "--compilation-config": "leave it out, nothing is compiled; --cuda-graph-bs names the batch "
    "sizes that are recorded",
    "--limit-mm-per-prompt": "images are not taken in this version",
    "--no-enable-chunked-prefill": "leave it out, a --chunked-prefill-size as large as "
    "--max-model-len never cuts a prompt",
    "--max-logprobs": "leave it out, requests may ask for 20",
    "--max-parallel-loading-workers": "leave it out, every rank loads its own part",
    "--stream-interval": "leave it out, every token is sent as it comes",
    "--runner": _NO_EMBEDDINGS,
    "--task": _NO_EMBEDDINGS,
    "--dataset-name": _DRAWN,
    "--dataset-path": _DRAWN,
    "--backend": "leave it out, any server of the OpenAI API is measured; see --endpoint",
    "--save-result": "use --output-file",
    # SGLang
    "--ep-size": _NO_EXPERTS,
    "--ep": _NO_EXPERTS,
    "--enable-dp-attention": "use --data-parallel-size, which copies the model",
    "--tokenizer-path": _TOKENIZER,
    "--max-prefill-tokens": "use --chunked-prefill-size",
    "--base-gpu-id": "use --device cuda:N",
    "--watchdog-timeout": "use --startup-timeout for the start-up",
    "--is-embedding": _NO_EMBEDDINGS,
    "--lora-paths": _NO_ADAPTERS,
    "--sampling-backend": _BY_DEVICE,
    "--speculative-algorithm": _NO_DRAFTS,
    "--disaggregation-mode": _NO_DISAGGREGATION,
    "--hicache-storage-backend": "there is no network cache in this version",
    "--schedule-conservativeness": "leave it out, requests that no longer fit are suspended",
    "--log-requests": "a line without the text is logged per request; see --log-level",
    "--dist-timeout": "use --startup-timeout for the start-up, --peer-timeout later",
    # Dynamo
    "--http-port": "use --port",
    "--router-mode": "use --load-balance-method",
    "--model-name": "use --served-model-name",
    # TokenSpeed
    "--world-size": "leave it out, it is --tensor-parallel-size times --pipeline-parallel-size "
    "times --data-parallel-size",
    "--control-port": "leave it out, there is one port: --port",
    "--gateway-startup-timeout": "use --startup-timeout",
    "--ext-yaml": "use --config with a TOML file",
    "--kvstore-storage-backend": "there is no network cache in this version",
    # llama.cpp
    "-c": "use --max-model-len",
    "--ctx-size": "use --max-model-len",
    "-np": "use --max-num-seqs",
    "--parallel": "use --max-num-seqs",
    "-b": "use --chunked-prefill-size",
    "--batch-size": "use --chunked-prefill-size",
    "--threads": "set the variable OMP_NUM_THREADS",
    "-t": "set the variable OMP_NUM_THREADS",
    "-hf": "use --model with the hub id, or with a GGUF file that `hf download` brought",
    "--hf-repo": "use --model with the hub id, or with a GGUF file that `hf download` brought",
    "-ngl": _BY_DEVICE,
    "--n-gpu-layers": _BY_DEVICE,
    "--gpu-layers": _BY_DEVICE,
    "--cache-type-k": _KV_DTYPE,
    "--cache-type-v": _KV_DTYPE,
    "-ctk": _KV_DTYPE,
    "-ctv": _KV_DTYPE,
    "-ub": "use --chunked-prefill-size",
    "--ubatch-size": "use --chunked-prefill-size",
    "--threads-batch": "set the variable OMP_NUM_THREADS",
    "-tb": "set the variable OMP_NUM_THREADS",
    "--chat-template-file": "use --chat-template, which takes a file too",
    "--lora": _NO_ADAPTERS,
    "--embedding": "leave it out, /v1/embeddings is always there",
    "--embeddings": "leave it out, /v1/embeddings is always there",
    "--model-draft": _NO_DRAFTS,
    "--mmproj": "images are not taken in this version",
    "-v": "use --log-level debug",
    "--verbose": "use --log-level debug",
    "-p": "give the prompt without a flag",
    "--prompt": "give the prompt without a flag",
}

IGNORED: dict[str, str] = {
    "--enable-log-requests": "a line without the text is logged per request; see --log-level",
    "--enable-auto-tool-choice": "tools are always taken where the model's chat template has them",
    "--enable-metrics": "metrics are always on, see /metrics",
    "--enable-sleep-mode": "memory can always be given back, see /sleep",
    "--enable-memory-saver": "memory can always be given back, see /release_memory_occupation",
    "--enable-chunked-prefill": "prompts are always prefilled in chunks",
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--enable-cache-report": "cached tokens are always in a reply's usage",
    "--enable-prompt-tokens-details": "cached tokens are always in a reply's usage",
    "--disable-custom-all-reduce": "there is none",
    "--skip-server-warmup": "there is no warm-up",
    "--jinja": "chat templates are always rendered as Jinja",
    "--metrics": "metrics are always on, see /metrics",
    "--cont-batching": "requests always join a batch while it runs",
    "-cb": "requests always join a batch while it runs",
}
"""Switches that ask for what is so anyway: taken, with a note."""
