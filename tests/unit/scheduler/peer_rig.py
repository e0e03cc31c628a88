"""A prefill and a decode engine's schedulers, each with a rig, and a peer that is not there.

What a prefill engine would write is written when the test says that it arrived, and at any
time before that garbage: whoever gets a block too soon reads it.
"""

from scheduler_rig import GARBAGE, Rig, config, sampled

from drumline.contract.plan import Plan, RemoteDecode, RemotePrefill
from drumline.contract.specs import AttentionKind
from drumline.core.config import Role
from drumline.scheduler.events import (
    Bootstrapped,
    RemoteFailed,
    RemotePrefilled,
    RemoteSucceeded,
)


class PeerRig:
    """One engine's scheduler, and what passes between it and its peer."""

    def __init__(self, role: Role, cfg=None, **changes) -> None:
        self.rig = Rig(cfg or config(role=role, **changes))
        self.coming: dict[str, RemotePrefill] = {}
        self.going: dict[str, RemoteDecode] = {}
        self.seen: dict[str, list] = {}

    @property
    def scheduler(self):
        return self.rig.scheduler

    def submit(self, rid: str, tokens, **changes) -> str | None:
        return self.rig.submit(rid, tokens, **changes)

    def start(self, rid: str, tokens, **changes) -> None:
        """Submit a request whose peers know each other."""
        assert self.submit(rid, tokens, **changes) is None
        self.tell(Bootstrapped(rid))

    def tell(self, *events) -> None:
        self.scheduler.advance(list(events))
        self.scheduler.check()

    def plan(self) -> Plan:
        for stream in self.coming.values():
            self._write(stream, spoil=True)
        for rid, stream in self.going.items():
            assert self._contents(stream) == self.seen[rid], f"{rid} is sent, and was changed"
        plan = self.rig.plan()
        for stream in plan.remote_prefills:
            assert stream.rid not in self.coming
            self.coming[stream.rid] = stream
            self._write(stream, spoil=True)
        for sent in plan.remote_decodes:
            self._check_sent(sent)
            self.going[sent.rid] = sent
            self.seen[sent.rid] = self._contents(sent)
        return plan

    def round(self) -> Plan:
        plan = self.plan()
        while self.rig.in_flight:
            self.rig.commit()
        return plan

    # -- a decode engine's peer -----------------------------------------------------------

    def arrive(self, rid: str) -> None:
        """Have all of a prompt's cache written, and say so."""
        stream = self.coming.pop(rid)
        self._write(stream, spoil=False)
        self.tell(RemotePrefilled(rid, int(sampled(stream.prompt_tokens))))

    def _write(self, stream: RemotePrefill, *, spoil: bool) -> None:
        prompt = stream.prompt_tokens
        history = self.rig._history(stream.rid, prompt)
        for index, group in enumerate(self.rig.config.groups):
            memory, table = self.rig.memory[index], stream.tables[index].tolist()
            if group.kind is AttentionKind.STATE:
                memory[table[0], 0] = GARBAGE if spoil else history[prompt - 1]
                continue
            for position in range(stream.cached_tokens, prompt):
                block = table[position // group.block_tokens]
                if block:
                    value = GARBAGE if spoil else history[position]
                    memory[block, position % group.block_tokens] = value

    def fail(self, rid: str) -> None:
        self.coming.pop(rid, None)
        self.going.pop(rid, None)
        self.tell(RemoteFailed(rid))

    # -- a prefill engine's peer ------------------------------------------------------------

    def succeed(self, rid: str) -> None:
        self.going.pop(rid)
        self.tell(RemoteSucceeded(rid))

    def _contents(self, sent: RemoteDecode) -> list:
        return [
            [self.rig.memory[index].get((block, slot)) for slot in range(self.rig._size(index))]
            for index, table in enumerate(sent.tables)
            for block in table.tolist()
            if block
        ]

    def _check_sent(self, sent: RemoteDecode) -> None:
        prompt = sent.prompt_tokens
        assert sent.token == sampled(prompt)
        history = self.rig._history(sent.rid, prompt)
        for index, group in enumerate(self.rig.config.groups):
            memory, table = self.rig.memory[index], sent.tables[index].tolist()
            if group.kind is AttentionKind.STATE:
                assert memory[table[0], 0] == history[prompt - 1]
                continue
            first = 0 if group.window_tokens is None else max(prompt - group.window_tokens + 1, 0)
            for position in range(first, prompt):
                seen = memory[table[position // group.block_tokens], position % group.block_tokens]
                assert seen == history[position], f"position {position} is another's"
