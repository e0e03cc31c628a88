"""What each verb of `drumline` takes, as structs from which its flags are derived."""

from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.config import (
    CacheConfig,
    ChatConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    ProcessConfig,
    ScheduleConfig,
)
from drumline.core.config.bench import LoadConfig, TargetConfig
from drumline.core.config.fields import Positive, flags


class SamplingOptions(Struct, frozen=True, kw_only=True):
    """How the answer is drawn."""

    max_tokens: Annotated[
        Positive | None,
        Meta(
            description="most tokens of an answer; what fits by default",
            extra=flags("--n-predict", "-n"),
        ),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        Meta(description="0 takes the likeliest token; default 1", extra=flags("--temp")),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="draw from the likeliest tokens of this share"),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="draw from this many of the likeliest tokens"),
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="leave out tokens below this share of the likeliest"),
    ] = None
    system: Annotated[str | None, Meta(description="system message before the first prompt")] = None


class EngineOptions(Struct, frozen=True, kw_only=True):
    """The engine's options that apply without a server."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    chat: ChatConfig = ChatConfig()
    process: ProcessConfig = ProcessConfig()


class OutputOptions(Struct, frozen=True, kw_only=True):
    """How the prompt is read and the answer shown."""

    raw: Annotated[
        bool, Meta(description="complete the prompt as it stands, without the chat template")
    ] = False
    json: Annotated[bool, Meta(description="print one JSON object in place of the text")] = False


class MergeOptions(Struct, frozen=True, kw_only=True):
    """What becomes of them."""

    output: Annotated[
        str, Meta(min_length=1, description="the file to write, which must not exist")
    ] = "merged.trace.json.gz"


class Profile(Struct, frozen=True, kw_only=True):
    """Merge the profiles of several ranks into one."""

    merge: MergeOptions = MergeOptions()


class ReportOptions(Struct, frozen=True, kw_only=True):
    """What becomes of the figures."""

    output_file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="a file for the figures as JSON, beside the table",
            extra=flags("--result-filename"),
        ),
    ] = None


class Bench(Struct, frozen=True, kw_only=True):
    """Measure a server that runs, drumline's or another of the OpenAI API."""

    target: TargetConfig = TargetConfig()
    load: LoadConfig = LoadConfig()
    report: ReportOptions = ReportOptions()


class Serve(Struct, frozen=True, kw_only=True):
    """Serve a model over HTTP."""

    config: Config = Config()


class Generate(Struct, frozen=True, kw_only=True):
    """Answer one prompt."""

    output: OutputOptions = OutputOptions()
    sampling: SamplingOptions = SamplingOptions()
    engine: EngineOptions = EngineOptions()


class Chat(Struct, frozen=True, kw_only=True):
    """Talk with a model."""

    sampling: SamplingOptions = SamplingOptions()
    engine: EngineOptions = EngineOptions()
