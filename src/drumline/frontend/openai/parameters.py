"""What becomes of each parameter of a request: it is honoured, refused by name, or ignored.

Honoured are the fields of the request structs (`openai.schema`). This is the table of the
others: what OpenAI's API and other engines' servers take and this one does not. One that
could change the text is refused, because an answer that quietly differs from what was asked
is worse than none; one that cannot is ignored. A name that stands nowhere may be a slip, so
the log says it once.

A parameter that is learned leaves the table and becomes a field.
"""

import difflib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from drumline.core.errors import RequestError

_log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder(dict[str, Raw])

_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
_NAMES_TOLD = 64
_LONGEST_NAME = 64
_NEAR = 0.8


class Refused(Struct, frozen=True):
    """A parameter that is refused, and what its sender is told.

    `neutral` are the values that ask for nothing, beside those that are empty.
    """

    why: str
    neutral: tuple[Any, ...] = ()

    def asks(self, value: Any) -> bool:
        """Whether `value` asks for anything. Zero does: it is no empty value."""
        return not any(
            type(value) is type(nothing) and value == nothing
            for nothing in (*_NOTHING, *self.neutral)
        )


_OLD_TOOLS = "use tools and tool_choice"
_NO_SAMPLER = "there is no such sampler here; temperature, top_p, top_k and min_p shape the draw"
_NO_BEAMS = "there is no beam search"
_NO_TRUNCATION = "prompts are not shortened; send what fits"
_NO_TRANSFER = "requests are not split among engines here"
_NO_TEMPLATE = "templates are the operator's, who sets --chat-template"
_NO_ADAPTERS = "adapters are not loaded"
_TEXT_ONLY = "answers are text"

REFUSED: dict[str, Refused] = {
    # OpenAI
    "functions": Refused(_OLD_TOOLS),
    "function_call": Refused(_OLD_TOOLS, ("none", "auto")),
    "modalities": Refused(_TEXT_ONLY, (["text"],)),
    "audio": Refused(_TEXT_ONLY),
    "web_search_options": Refused("nothing is searched"),
    "verbosity": Refused("answers have one verbosity; ask for it in the prompt", ("medium",)),
    "suffix": Refused("insertion is not supported"),
    # vLLM
    "use_beam_search": Refused(_NO_BEAMS),
    "length_penalty": Refused(_NO_BEAMS, (1, 1.0)),
    "early_stopping": Refused(_NO_BEAMS),
    "truncation": Refused(_NO_TRUNCATION, ("disabled",)),
    "spaces_between_special_tokens": Refused("text is decoded as one piece", (True,)),
    "chat_template": Refused(_NO_TEMPLATE),
    "documents": Refused("documents are not put before a template; write them into a message"),
    "mm_processor_kwargs": Refused("this model takes text only"),
    "vllm_xargs": Refused("arguments of another engine's plug-ins are not known"),
    "guided_whitespace_pattern": Refused("white space of JSON is bounded, and not by a pattern"),
    "thinking_token_budget": Refused("reasoning is not bounded by itself; max_tokens is for all"),
    "return_tokens_as_token_ids": Refused("use return_token_ids"),
    "prompt_embeds": Refused("prompts are texts or token ids"),
    "kv_transfer_params": Refused(_NO_TRANSFER),
    # SGLang
    "stop_regex": Refused("stop takes strings, stop_token_ids takes ids"),
    "no_stop_trim": Refused("use include_stop_str_in_output"),
    "structural_tag": Refused("write it as response_format"),
    "custom_logit_processor": Refused("processors of clients are not run"),
    "custom_params": Refused("processors of clients are not run"),
    "return_hidden_states": Refused("hidden states are not reported"),
    "lora_path": Refused(_NO_ADAPTERS),
    "session_params": Refused("there are no sessions; send the whole conversation"),
    "input_ids": Refused("send token ids as the prompt of /v1/completions"),
    "max_new_tokens": Refused("use max_tokens"),
    "min_new_tokens": Refused("use min_tokens"),
    "bootstrap_host": Refused(_NO_TRANSFER),
    "bootstrap_room": Refused(_NO_TRANSFER),
    # llama.cpp and others
    "grammar": Refused("use ebnf, regex or json_schema"),
    "n_predict": Refused("use max_tokens"),
    "repeat_penalty": Refused("use repetition_penalty", (1, 1.0)),
    "tfs_z": Refused(_NO_SAMPLER, (1, 1.0)),
    "top_a": Refused(_NO_SAMPLER, (0, 0.0)),
    "top_n_sigma": Refused(_NO_SAMPLER, (-1, -1.0)),
    "mirostat": Refused(_NO_SAMPLER, (0,)),
    "mirostat_mode": Refused(_NO_SAMPLER, (0,)),
    "dry_multiplier": Refused(_NO_SAMPLER, (0, 0.0)),
    "xtc_probability": Refused(_NO_SAMPLER, (0, 0.0)),
    "dynatemp_range": Refused(_NO_SAMPLER, (0, 0.0)),
    "no_repeat_ngram_size": Refused("use repetition_penalty", (0,)),
    "eta_cutoff": Refused(_NO_SAMPLER, (0, 0.0)),
    "epsilon_cutoff": Refused(_NO_SAMPLER, (0, 0.0)),
}
"""What could change the text, or must be in the reply, and is not to be had."""

IGNORED: dict[str, str] = {
    "user": "clients are not told apart",
    "safety_identifier": "clients are not told apart",
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one",
    "prompt_cache_key": "prefixes are found by their content",
    "prompt_cache_retention": "prefixes stay while there is room",
    "prediction": "it would only save time",
    "reasoning": "use reasoning_effort",
    "stream_reasoning": "reasoning is streamed as the rest of an answer is",
    "guided_decoding_backend": "the operator chose one",
    "detokenize": "replies are text",
    "cache_prompt": "prefixes are always kept",
    "id_slot": "there are no slots",
}
"""What cannot change the text."""


class Rest(Struct, frozen=True):
    """What becomes of the parameters of a dialect that are no fields of its bodies."""

    refused: Mapping[str, Refused]
    ignored: Mapping[str, str]


REST = Rest(REFUSED, IGNORED)


class ParameterCheck:
    """Judges the parameters of one route's requests that are no fields of its struct.

    Thread: the event loop's.
    """

    def __init__(self, kind: type[Struct], rest: Rest = REST) -> None:
        self._rest = rest
        self._fields = frozenset(kind.__struct_fields__)
        self._told: set[str] = set()

    def check(self, body: bytes) -> None:
        """Raise RequestError 400 naming the first parameter that is refused.

        `body` was decoded before, so it is a JSON object.
        """
        for name, raw in _decoder.decode(body).items():
            if name in self._fields or name in self._rest.ignored:
                continue
            refused = self._rest.refused.get(name)
            if refused is None:
                self._tell(name)
            elif refused.asks(msgspec.json.decode(raw)):
                raise unsupported(name, refused.why)

    def _tell(self, name: str) -> None:
        """Log a name that stands nowhere; each once, and not endlessly many."""
        name = name[:_LONGEST_NAME]
        if name in self._told or len(self._told) >= _NAMES_TOLD:
            return
        self._told.add(name)
        near = difflib.get_close_matches(name, self._fields, n=1, cutoff=_NEAR)
        hint = f"; did its sender mean {near[0]}?" if near else ""
        _log.warning("requests have an unknown field %r, which is ignored%s", name, hint)
        if len(self._told) == _NAMES_TOLD:
            _log.warning("further unknown fields are ignored without a word")


def unsupported(param: str, why: str) -> RequestError:
    """Return the refusal of a parameter that would change the answer and is not honoured."""
    return RequestError(400, f"{param}: {why}", param=param, code="unsupported_parameter")
