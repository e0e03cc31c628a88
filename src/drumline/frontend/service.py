"""What every route needs to serve one model: engine link, tokenizer, limits, metrics."""

from typing import Protocol

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector

from drumline.core.clock import SystemClock
from drumline.core.config import ChatConfig, Config, ServerConfig
from drumline.core.errors import RequestError, quoted
from drumline.frontend.cache_states import CacheStates
from drumline.frontend.desk import Desk, OneDesk
from drumline.frontend.engine_control import Control, EngineControl
from drumline.frontend.engine_link import EngineLink
from drumline.frontend.limits import Limits
from drumline.frontend.live_requests import LiveRequests
from drumline.frontend.parts.form import form_of
from drumline.frontend.running import Running
from drumline.frontend.text.chat_template import ChatTemplate, given_template
from drumline.frontend.text.prompt_encoder import PromptEncoder
from drumline.frontend.text.tokenizer import Tokenizer
from drumline.frontend.turns import Turns
from drumline.metrics.caches import CacheCollector
from drumline.metrics.loads import LoadCollector
from drumline.metrics.requests import RequestMetrics
from drumline.wire.handshake import Registration


class Timings(Struct, frozen=True, kw_only=True):
    """Delays of the HTTP side, in seconds."""

    ping_s: float = 15.0
    """Silence after which a stream gets a comment."""
    first_output_s: float = 1.0
    """How long a stream's status waits for the engine's first word, which may be a refusal."""
    stall_s: float = 60.0
    """Running work without output for this long is unhealthy."""
    ask_s: float = 2.0
    """How long engines have to say what is in their caches."""
    control_s: float = 600.0
    """How long a control operation may take, such as a pause that waits for long answers."""
    turn_s: float = 60.0
    """How long a body of tensors may wait for the one before it."""
    body_s: float = 300.0
    """How long such a body may take to come."""
    progress_s: float = 0.5
    """How long engines have to say in which round they are."""
    probe_s: float = 20.0
    """How long engines have to make the token that a probe asks for."""


class Shared(Protocol):
    """What several workers have in common, at the hands of one of them."""

    @property
    def control(self) -> Control:
        """How engines are steered."""

    def desk(self, live: LiveRequests, registry: CollectorRegistry) -> Desk:
        """Return what they agree on; `live` and `registry` are this worker's share of it."""


class Service:
    """One served model. Thread: the event loop's."""

    def __init__(
        self,
        server: ServerConfig,
        model_names: tuple[str, ...],
        engine: EngineLink,
        registration: Registration,
        tokenizer: Tokenizer,
        *,
        chat: ChatConfig | None = None,
        seed: int | None = None,
        config: Config | None = None,
        registry: CollectorRegistry | None = None,
        timings: Timings | None = None,
        clock: SystemClock | None = None,
        shared: Shared | None = None,
    ) -> None:
        """Serve `engine` under `model_names`, of which the first is the one reported.

        `seed` is that of requests which name none; without it each draws its own. `config` is
        what the operator chose, as far as that is to be shown. `shared` is what other workers
        share with this one; without it, it is alone.
        Raises ConfigError when the chat template does not compile.
        """
        facts = tokenizer.facts
        self.server = server
        self.config = config or Config(server=server)
        self.model_names = model_names
        self.engine = engine
        self.registration = registration
        self.tokenizer = tokenizer
        self.seed = seed
        self.timings = timings or Timings()
        self.clock = clock or SystemClock()
        self.created = int(self.clock.wall_s())
        self.limits = Limits.of(registration, tokenizer.vocab_size)
        chat = chat or ChatConfig()
        template = (
            facts.chat_template
            if chat.chat_template is None
            else given_template(chat.chat_template)
        )
        self.template = (
            ChatTemplate(
                template,
                bos_token=facts.bos_token,
                eos_token=facts.eos_token,
                clock=self.clock,
            )
            if template is not None
            else None
        )
        self.form = form_of(template, chat)
        self.mark_ids = tokenizer.special_ids(self.form.marks)
        self.encoder = PromptEncoder(tokenizer)
        self.turns = Turns()
        self.operations = Running()
        self.registry = registry or CollectorRegistry()
        self.metrics = RequestMetrics(self.registry, self.model)
        self.caches = CacheStates(engine, self.timings.ask_s)
        ProcessCollector(registry=self.registry)
        if shared is not None:
            # Places are counted, and engines shown, where all workers meet.
            self.live = LiveRequests(self.metrics.in_flight)
            self.control: Control = shared.control
            self.desk: Desk = shared.desk(self.live, self.registry)
            return
        self.live = LiveRequests(self.metrics.in_flight, server.max_concurrent_streams)
        self.control = EngineControl(engine, self.timings.control_s, self.clock)
        self.desk = OneDesk(self.live, self.registry, self.caches)
        LoadCollector(self.registry, self.model, lambda: engine.loads)
        CacheCollector(self.registry, self.model, lambda: self.caches.last)

    @property
    def model(self) -> str:
        """The name under which the model is reported."""
        return self.model_names[0]

    @property
    def page_tokens(self) -> int:
        """How many tokens a page of the KV pool holds.

        An engine does not register it, but the longest request that its pages hold, which is a
        page or two short of all of them; and a page divides what prefixes are hashed by.
        """
        pages, tokens = self.registration.num_gpu_blocks, self.registration.kv_cache_size_tokens
        hashed = self.registration.prefix_granularity
        if not tokens or not pages:
            return hashed
        sizes = (size for size in range(1, hashed) if hashed % size == 0 and size * pages >= tokens)
        return next(sizes, hashed)

    def check_model(self, name: str | None) -> None:
        """Raise RequestError 404 unless `name` is a name of the model, or none at all."""
        if name and name not in self.model_names:
            known = ", ".join(self.model_names)
            raise RequestError(
                404,
                f"there is no model {quoted(name)} here; this server has: {known}",
                param="model",
                code="model_not_found",
            )

    def close(self) -> None:
        """Give up what the service holds; the engine link is not its own."""
        self.encoder.close()
