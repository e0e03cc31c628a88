"""Where both planes meet: build the device, wire the control plane to it, serve, stop.

It decides nothing: policy is in the configuration, geometry in the device's specs.
"""

import logging
import signal
import tempfile
import threading
from typing import Protocol

import torch

from drumline.contract.specs import DeviceSpecs
from drumline.contract.startup import RankSettings
from drumline.control.event_loop import EventLoop, Ranks
from drumline.control.ingress import Limits
from drumline.control.profiles import Place
from drumline.control.transport import CONNECT_TIMEOUT_S, INIT_TIMEOUT_S, Transport
from drumline.core.clock import SystemClock
from drumline.core.config import Config, GrammarBackend
from drumline.core.errors import DrumlineError, PeerError
from drumline.core.model_files import find_model
from drumline.device.build import build
from drumline.device.choice import device_of
from drumline.device.data_plane import QueuedDataPlane
from drumline.device.forward_thread import ForwardThread
from drumline.device.guards import ForwardChecks, NoDevice
from drumline.device.parallel import (
    LinkedGroup,
    LinkedStages,
    LostMemberError,
    Stages,
    TensorGroup,
    dial_store,
    open_store,
    part_of,
    share_processors,
)
from drumline.grammar.compiler import GrammarCache
from drumline.grammar.vocabulary import Vocabulary, read_vocabulary
from drumline.rank.company import Company, gathered
from drumline.rank.heap import freeze_heap
from drumline.rank.lifeline import Reports
from drumline.rank.registration import registration_of
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)


def serve(settings: RankSettings, reports: Reports, stop: threading.Event) -> None:
    """Build a rank, serve until every rank agreed to stop or the frontend is gone.

    Raises ConfigError when the operator can mend what start-up met, PeerError when
    the frontend or another rank is missing, InvariantError when a promise of ours broke.
    """
    reports.begin("meeting the other ranks")
    with gathered(settings) as company:
        company.watch(reports.lost)
        try:
            _serve(settings, company, reports, stop)
        except LostMemberError as error:
            raise company.cause(error) from error


def _serve(
    settings: RankSettings, company: Company, reports: Reports, stop: threading.Event
) -> None:
    config = settings.config
    # Launchers of other machines do not know where the frontend is.
    handshake = company.told(settings.handshake)
    reports.begin("loading the model")
    thread = ForwardThread()
    thread.call(lambda: share_processors(config.parallel.local_ranks))
    ranks = config.parallel.local_ranks
    where = thread.call(lambda: device_of(config.model.device, company.rank % ranks, ranks))
    device = build(config, thread, *_links(thread, company, where), where)
    specs = device.specs
    scheduler = Scheduler(SchedulerConfig.of(specs, config))
    data_plane = QueuedDataPlane(device.handle, thread)
    checks = ForwardChecks(config.process.device_checks, device.startup.device)
    del device  # what start-up alone needed is freed
    reports.begin("comparing with the other ranks")
    company.compare(specs)
    transport = None
    if company.leads:
        reports.begin("meeting the frontend")
        transport = Transport(
            handshake,
            registration_of(
                specs,
                config,
                scheduler.max_request_tokens,
                company.layout.data_index(company.rank),
            ),
            engine_index=settings.engine_index,
        )
    grammars = _grammars(config, specs)
    try:
        if transport is not None:
            transport.start()
            await_frontend(transport)
        loop = EventLoop(
            scheduler=scheduler,
            data_plane=data_plane,
            frontend=transport,
            clock=SystemClock(),
            ranks=Ranks(
                replica=company.replica,
                world=company.world,
                pipeline=company.pipeline,
                members=company.layout.replica(company.rank),
                rank=company.rank,
            ),
            limits=Limits.of(
                specs,
                scheduler.max_request_tokens,
                grammars=grammars is not None,
                processors=config.model.logits_processors,
            ),
            specs=specs,
            in_flight_depth=config.in_flight_depth,
            grammars=grammars,
            profiles=Place(config.process.profile_dir or tempfile.gettempdir(), _tag(company)),
            weight_version=config.model.weight_version,
        )
        freeze_heap()
        thread.serve_checked(checks)
        # Nobody enters the first round's exchange while others still start.
        reports.begin("waiting for the other ranks")
        company.meet()
        # Until here a signal ends the process: there was nothing to finish.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        reports.ready(_summary(specs))
        with NoDevice():
            loop.run(stop)
        reports.begin("finishing the last forwards")
    except DrumlineError:
        # The forward thread may never answer again; nothing waits for it.
        if transport is not None:
            transport.close()
        raise
    finally:
        if grammars is not None:
            grammars.close()
    if transport is not None:
        transport.close()
    data_plane.shutdown()
    # What one rank still computes may need the others.
    company.meet()
    if transport is not None:
        check_ended(transport)


class Link(Protocol):
    """The frontend's link, as a rank's start and end see it."""

    @property
    def failure(self) -> str | None:
        """Why the link ended by itself."""

    def ready(self, timeout_s: float) -> bool:
        """Wait and return whether the frontend took the registration; PeerError if it failed."""


def await_frontend(link: Link, timeout_s: float = INIT_TIMEOUT_S + CONNECT_TIMEOUT_S) -> None:
    """Wait until the wire is connected: a rank that nobody can reach is not ready.

    Raises PeerError saying why it is not.
    """
    if not link.ready(timeout_s):
        raise PeerError(f"the frontend did not take the registration within {timeout_s:g} s")


def check_ended(link: Link) -> None:
    """Raise PeerError where the link's end, and no word of anybody's, ended the rounds."""
    if link.failure is not None:
        raise PeerError(f"the link to the frontend ended: {link.failure}")


def _links(
    thread: ForwardThread, company: Company, device: torch.device
) -> tuple[TensorGroup | None, Stages | None]:
    """Return the ranks that compute this replica's forwards, linked on the forward thread.

    Those are the members of this rank's stage, and the stages. Collective: over the replica,
    which tells each other where to meet.
    """
    layout, rank = company.layout, company.rank
    replica, host = company.replica, company.host
    if replica.size == 1:
        return None, None
    opened = thread.call(lambda: open_store(host)) if company.leads else None
    place = f"{host}:{opened.port}" if opened is not None else ""
    where, _, port = replica.broadcast(0, place.encode()).decode().rpartition(":")

    def linked() -> tuple[TensorGroup | None, Stages | None]:
        store = opened or dial_store(where, int(port))
        stage, place = layout.stage_index(rank), layout.tensor_index(rank)
        group, stages = None, None
        if layout.tensor > 1:
            meeting = part_of(store, f"tensors of stage {stage}")
            group = LinkedGroup(meeting, place, layout.tensor, host=host, device=device)
        if layout.pipeline > 1:
            meeting = part_of(store, f"stages at place {place}")
            stages = LinkedStages(meeting, stage, layout.pipeline, host=host, device=device)
        return group, stages

    return thread.call(linked)


def _grammars(config: Config, specs: DeviceSpecs) -> GrammarCache | None:
    """Return what compiles grammars; nothing of it is loaded before the first one."""
    if config.grammar.grammar_backend is GrammarBackend.NONE or not specs.model.eos_token_ids:
        return None

    def vocabulary() -> Vocabulary:
        files = find_model(config.model.model)
        return read_vocabulary(files, specs.model.vocab_size, specs.model.eos_token_ids)

    return GrammarCache(config.grammar, vocabulary, SystemClock())


def _tag(company: Company) -> str:
    """Return how a rank's files are called: by its places in replica and engine."""
    layout, rank = company.layout, company.rank
    place = f"TP{layout.tensor_index(rank)}"
    if layout.pipeline > 1:
        place = f"PP{layout.stage_index(rank)}-{place}"
    return f"DP{layout.data_index(rank)}-{place}" if layout.data > 1 else place


def _summary(specs: DeviceSpecs) -> str:
    return (
        f"{specs.model.name}: {specs.model.architecture} in {specs.model.dtype} on "
        f"{specs.device} by {specs.backend}, context {specs.model.max_model_len}, "
        f"KV pool {specs.kv_tokens} tokens as {specs.kv_dtype}, {specs.max_rows} requests at a time"
    )
