"""What `drumline bench` asks of a server, and which one it asks."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.config.fields import Key, ModelName, NotNegative, Positive, flags


class Endpoint(StrEnum):
    """Where prompts are posted."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class TargetConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server."""

    base_url: Annotated[
        str, Meta(description="where the server is, with or without /v1 at its end")
    ] = "http://127.0.0.1:8000"
    endpoint: Annotated[
        Endpoint,
        Meta(description="where prompts are posted: as token ids, or as a message of common words"),
    ] = Endpoint.COMPLETIONS
    model: Annotated[
        ModelName | None,
        Meta(
            description="the model's name there; the first that the server lists by default",
            extra=flags("-m"),
        ),
    ] = None
    api_key: Annotated[Key | None, Meta(description="the key that the server wants")] = None
    request_timeout: Annotated[
        float,
        Meta(gt=0, le=1e9, description="seconds after which a request counts as failed"),
    ] = 600.0


class LoadConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked."""

    num_prompts: Annotated[Positive, Meta(description="requests in all")] = 100
    request_rate: Annotated[
        float,
        Meta(
            gt=0,
            description="requests a second, at the random moments of a Poisson process; inf sends "
            "all at once",
        ),
    ] = float("inf")
    max_concurrency: Annotated[
        Positive | None,
        Meta(
            description="requests under way at most, others wait to be sent; any number by default"
        ),
    ] = None
    random_input_len: Annotated[
        Positive,
        Meta(description="tokens of a prompt", extra=flags("--input-len")),
    ] = 1024
    random_output_len: Annotated[
        Positive,
        Meta(description="tokens of an answer", extra=flags("--output-len")),
    ] = 128
    random_range_ratio: Annotated[
        Annotated[float, Meta(ge=0, lt=1)],
        Meta(
            description="by which part of these two lengths requests differ from them, up or down; "
            "0 gives all the same"
        ),
    ] = 0.0
    vocab_size: Annotated[
        Annotated[int, Meta(ge=2)],
        Meta(description="token ids are drawn below this; at most the model's vocabulary"),
    ] = 32_000
    ignore_eos: Annotated[
        bool,
        Meta(
            description="have answers go on to their length; servers of the plain OpenAI API "
            "refuse the field",
            extra={"off": ["--disable-ignore-eos"]},
        ),
    ] = True
    seed: Annotated[NotNegative, Meta(description="of all that is drawn")] = 0
