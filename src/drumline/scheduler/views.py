"""What a row's block tables look like from outside, as plans tell a transfer peer."""

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.index import IndexArray
from drumline.scheduler.rows import Rows
from drumline.scheduler.states import StateSlots
from drumline.scheduler.tables import BlockTables


class RowViews:
    """The tables of a row in all groups, in the groups' own page ids."""

    __slots__ = ("_pool", "_rows", "_states", "_tables")

    def __init__(
        self, pool: BlockPool, tables: BlockTables, states: StateSlots, rows: Rows
    ) -> None:
        self._pool = pool
        self._tables = tables
        self._states = states
        self._rows = rows

    def tables(self, row: int) -> tuple[IntArray, ...]:
        """Return a table a group, up to the row's last column; of a state group, its block."""
        lines: list[IndexArray] = [
            table[row, : columns[row]]
            for table, columns in zip(self._tables.table, self._rows.columns, strict=True)
        ]
        lines += [np.array([block]) for block in self._states.carried(row)]
        pages = [self._pool.pages(group, line) for group, line in enumerate(lines)]
        for page in pages:
            page.flags.writeable = False
        return tuple(pages)
