"""Requests that a frontend sends an engine."""

from typing import Any

from msgspec import Struct

from drumline.wire.multimodal import MultimodalDataItem, MultimodalInputs
from drumline.wire.sampling import SamplingParams


class SessionParams(Struct, array_like=True, kw_only=True):
    """Where a request continues a session; slots 0 … 3."""

    id: str | None = None
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None


class TokenizedGenerateReqInput(Struct, array_like=True, kw_only=True, tag=True):
    """A prompt to continue; slots 1 … 24 behind the tag.

    `rid` is the only identity of the request and of its outputs.
    """

    rid: str | list[str] | None = None
    http_worker_ipc: str | None = None
    input_text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    stream: bool = False
    input_embeds: list[Any] | None = None
    session_params: SessionParams | None = None
    custom_logit_processor: str | None = None
    return_hidden_states: bool = False
    created_time: float = 0.0
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    input_multi_ids: list[list[int]] | None = None
    input_extra_infos: list[dict[str, Any]] | None = None
    input_ids_unpadded: list[int] | None = None
    multimodal_inputs: MultimodalInputs | None = None
    validation_error: str | None = None
    data_parallel_rank: int | None = None


class TokenizedEmbeddingReqInput(Struct, array_like=True, kw_only=True, tag=True):
    """A text to embed. An engine that generates refuses it."""

    rid: str | list[str] | None = None
    http_worker_ipc: str | None = None
    input_text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams
    created_time: float = 0.0


class EncodeRequest(Struct, array_like=True, kw_only=True, tag=True):
    """Items for an encode server to embed and hand to a prefill server."""

    rid: str | list[str] | None
    http_worker_ipc: str | None
    request_id: str
    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    items: list[MultimodalDataItem]
