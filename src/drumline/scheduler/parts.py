"""The parts of one scheduler, made and introduced to each other, and checked together."""

from collections.abc import Callable

from drumline.core.config import Role
from drumline.scheduler.admission import Admission
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.capacity import max_request_tokens
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.decoding import Decoding
from drumline.scheduler.host import HostTier
from drumline.scheduler.index import IndexArray
from drumline.scheduler.kv_events import KvEvents
from drumline.scheduler.lifecycle import Move, State
from drumline.scheduler.loads import Loads
from drumline.scheduler.matching import Matcher
from drumline.scheduler.peers import Peers
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.publication import Publication
from drumline.scheduler.receiving import Receiving
from drumline.scheduler.requests import Request, RequestTable
from drumline.scheduler.results import Commits
from drumline.scheduler.retraction import Retraction
from drumline.scheduler.rows import Rows
from drumline.scheduler.sending import Sending
from drumline.scheduler.snapshots import Snapshots
from drumline.scheduler.states import StateSlots
from drumline.scheduler.storage.tier import storage_tier
from drumline.scheduler.tables import BlockTables
from drumline.scheduler.transfers import Transfers
from drumline.scheduler.views import RowViews


class Parts:
    """What a scheduler is made of, each part with those that it works on."""

    __slots__ = (
        "admission",
        "commits",
        "decoding",
        "host",
        "index",
        "kv_events",
        "loads",
        "max_request_tokens",
        "peers",
        "pool",
        "publication",
        "requests",
        "retraction",
        "rows",
        "snapshots",
        "states",
        "storage",
        "tables",
        "transfers",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        end: Callable[[Request, Move], None],
        bootstrapped: Callable[[Request], None],
    ) -> None:
        """`end` ends a request; `bootstrapped` learns whose peers have found each other."""
        width, size = config.decode_tokens, config.prefix_granularity
        self.max_request_tokens = max_request_tokens(config)
        slots = [size // group.block_tokens for group in config.paged_groups]
        slots += [1] * len(config.state_groups)
        self.index = PrefixIndex(size, slots)
        self.pool = BlockPool(config.groups, config.num_pages, self._given_up, self.index.depth)
        self.index.watch(self.pool)
        self.transfers = Transfers(self.pool)
        self.host = HostTier(config, self.pool, self.index, self.transfers)
        self.loads = Loads(self.host, self.pool, self.index, self.transfers)
        ahead = 4 * width * (1 + config.overlap_depth)
        self.rows = Rows(config.max_rows, len(config.paged_groups), size, ahead)
        self.tables = BlockTables(
            config.paged_groups,
            size,
            self.max_request_tokens + width * (1 + config.overlap_depth),
            self.pool,
            self.rows,
            config.unsure_tokens,
            len(config.state_groups),
        )
        self.states = StateSlots(
            config.state_groups,
            len(config.paged_groups),
            self.pool,
            self.rows,
            caching=config.prefix_caching,
        )
        self.requests = RequestTable()
        self.kv_events = KvEvents(self.index) if config.kv_events else None
        self.publication = Publication(
            size,
            self.index,
            self.pool,
            self.tables,
            self.states,
            self.rows,
            self.kv_events,
            self.host.offer if self.host.through else None,
        )
        matcher = Matcher(size, self.index, self.tables, self.host.index)
        self.storage = storage_tier(config, matcher, self.host, self.loads)
        self.peers = self._make_peers(config, matcher, end, bootstrapped)
        self.admission = Admission(
            config,
            self.requests,
            self.rows,
            self.pool,
            self.tables,
            self.states,
            matcher,
            self.publication,
            self.loads,
            self.storage,
            None if self.peers is None else self.peers.receiving,
        )
        self.decoding = Decoding(
            config,
            self.requests,
            self.rows,
            self.tables,
            self.states,
            self.publication,
            end,
        )
        self.snapshots = Snapshots(
            config,
            self.pool,
            self.index,
            self.rows,
            self.tables,
            self.states,
            self.host,
            self.transfers,
        )
        self.retraction = Retraction(
            config,
            self.requests,
            self.rows,
            self.pool,
            self.tables,
            self.states,
            self.publication,
            self.decoding,
            self.snapshots,
            self.transfers,
            end,
        )
        self.commits = Commits(config, self.requests, self.rows, self.decoding.roster)

    def _make_peers(
        self,
        config: SchedulerConfig,
        matcher: Matcher,
        end: Callable[[Request, Move], None],
        bootstrapped: Callable[[Request], None],
    ) -> Peers | None:
        if config.role is Role.PLAIN:
            return None
        views = RowViews(self.pool, self.tables, self.states, self.rows)
        sending: Sending | None = None
        receiving: Receiving | None = None
        if config.role is Role.PREFILL:
            sending = Sending(self.requests, self.rows, views)
        else:
            receiving = Receiving(
                self.requests,
                self.rows,
                self.pool,
                self.tables,
                self.states,
                matcher if config.prefix_caching else None,
                views,
                replayed=config.prefix_replay_tokens,
            )
        return Peers(config.role, self.requests, sending, receiving, bootstrapped, end)

    def _given_up(self, group: int, blocks: IndexArray) -> None:
        """Let go of what is cached in `blocks`, which the pool gives to somebody else."""
        if self.host.back:
            self.host.given_up(group, blocks)
        self.index.forget(group, blocks)

    def check(self) -> None:
        """Raise InvariantError unless every page, row and request is accounted for."""
        self.pool.check()
        self.index.check(self.pool)
        self.rows.check()
        self.tables.check([*self.transfers.held(), *self.states.held()])
        self.states.check()
        self.snapshots.pool.check()
        self.retraction.check()
        others = self.loads.held() + self.snapshots.host_blocks()
        if self.storage is not None:
            self.storage.check(self.requests.counts[State.PREFETCHING])
            others += self.storage.held()
        self.host.check(others)
        self.admission.check()
        self.decoding.check()
        if self.peers is not None:
            self.peers.check()
        self.requests.check()
