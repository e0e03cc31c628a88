"""Where both planes meet: build the device, wire the control plane to it, serve, stop.

It decides nothing: policy is in the configuration, geometry in the device's specs.
"""

import logging
import signal
import threading

from drumline.collective.solo import SoloGroup
from drumline.contract.specs import DeviceSpecs
from drumline.contract.startup import RankSettings
from drumline.control.event_loop import EventLoop, Ranks
from drumline.control.ingress import Limits
from drumline.control.transport import Transport
from drumline.core.clock import SystemClock
from drumline.core.errors import InvariantError
from drumline.device.build import build
from drumline.device.data_plane import QueuedDataPlane
from drumline.device.forward_thread import ForwardThread
from drumline.rank.heap import freeze_heap
from drumline.rank.lifeline import Reports
from drumline.rank.registration import registration_of
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)


def serve(settings: RankSettings, reports: Reports, stop: threading.Event) -> None:
    """Build a rank, serve until `stop` is set or the frontend is gone.

    Raises ConfigError when the operator can mend what start-up met, PeerError when
    the frontend does not answer, InvariantError when a promise of ours broke.
    """
    config = settings.config
    reports.begin("loading the model")
    thread = ForwardThread()
    device = build(config, thread)
    specs = device.specs
    scheduler = Scheduler(SchedulerConfig.of(specs, config))
    data_plane = QueuedDataPlane(device.handle, thread)
    del device  # what start-up alone needed is freed
    reports.begin("meeting the frontend")
    transport = Transport(
        settings.handshake,
        registration_of(specs, config, scheduler.max_request_tokens),
        engine_index=settings.engine_index,
    )
    try:
        transport.start()
        loop = EventLoop(
            scheduler=scheduler,
            data_plane=data_plane,
            frontend=transport,
            clock=SystemClock(),
            ranks=Ranks(SoloGroup(), SoloGroup()),
            limits=Limits.of(specs, scheduler.max_request_tokens),
            max_rows=specs.max_rows,
            total_pages=specs.num_pages - 1,
            in_flight_depth=config.schedule.in_flight_depth,
        )
        freeze_heap()
        # Until here a signal ends the process: there was nothing to finish.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        reports.ready(_summary(specs))
        loop.run(stop)
    except InvariantError:
        # The forward thread may never answer again; nothing waits for it.
        transport.close()
        raise
    transport.close()
    data_plane.shutdown()


def _summary(specs: DeviceSpecs) -> str:
    return (
        f"{specs.model.name}: {specs.model.architecture} in {specs.model.dtype} on "
        f"{specs.backend}, context {specs.model.max_model_len}, KV pool {specs.kv_tokens} tokens, "
        f"{specs.max_rows} requests at a time"
    )
