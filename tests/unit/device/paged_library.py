"""What FlashInfer's documentation says of the calls that are made of it, in plain PyTorch.

It notes every call, so that they can be held against the library's own signatures.
"""

import math

import torch

from .emulated_cuda import near


class PagedLibrary:
    """In place of the module. `plans` are the windows and rows of what was planned, in order."""

    def __init__(self):
        self.calls = []
        self.plans = []
        library = self

        class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
            def __init__(self, workspace, layout):
                library.note(type(self).__name__, "__init__", workspace, layout)
                super().__init__(library, workspace, layout)

            def plan(self, starts, page_starts, numbers, last, *shape, causal, **named):
                library.note(
                    type(self).__name__,
                    "plan",
                    starts,
                    page_starts,
                    numbers,
                    last,
                    *shape,
                    causal=causal,
                    **named,
                )
                assert causal
                self.planned(starts, page_starts, numbers, last, *shape, **named)

        class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
            def __init__(self, workspace, layout, **named):
                library.note(type(self).__name__, "__init__", workspace, layout, **named)
                super().__init__(library, workspace, layout)
                assert named["use_tensor_cores"]
                self.recorded = named.get("use_cuda_graph", False)
                if self.recorded:
                    self.starts = near(named["paged_kv_indptr_buffer"])
                    self.numbers = near(named["paged_kv_indices_buffer"])
                    self.last = near(named["paged_kv_last_page_len_buffer"])
                    assert len(self.starts) == len(self.last) + 1

            def plan(self, page_starts, numbers, last, *shape, **named):
                library.note(
                    type(self).__name__, "plan", page_starts, numbers, last, *shape, **named
                )
                if self.recorded:
                    # What a recording reads stays where it is.
                    assert len(last) == len(self.last)
                    assert near(numbers).data_ptr() == self.numbers.data_ptr()
                    self.starts.copy_(page_starts)
                    self.last.copy_(last)
                    page_starts, numbers, last = self.starts, self.numbers, self.last
                starts = torch.arange(len(last) + 1, dtype=torch.int32)
                self.planned(starts, page_starts, numbers, last, *shape, **named)

        self.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
        self.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper

    def note(self, owner, name, *arguments, **named):
        self.calls.append((owner, name, arguments, named))

    def append_paged_kv_cache(
        self, key, value, rows, positions, pool, numbers, starts, last, layout
    ):
        self.note(
            None,
            "append_paged_kv_cache",
            key,
            value,
            rows,
            positions,
            pool,
            numbers,
            starts,
            last,
            layout,
        )
        assert {each.dtype for each in (rows, positions, numbers, starts, last)} == {torch.int32}
        key, value, rows, positions, numbers, starts, last = map(
            near, (key, value, rows, positions, numbers, starts, last)
        )
        pool = tuple(map(near, pool))
        assert layout == "NHD"
        page = pool[0].shape[1]
        blocks = numbers[(starts[rows.long()] + positions // page).long()].long()
        for side, new in zip(pool, (key, value), strict=True):
            side[blocks, positions.long() % page] = new


class _Wrapper:
    def __init__(self, library, workspace, layout):
        assert layout == "NHD"
        assert not near(workspace).any()
        self.library = library
        self.workspace = workspace
        self._int_workspace_buffer = torch.zeros(64, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(64, dtype=torch.uint8)

    def reset_workspace_buffer(self, workspace, integers):
        self.library.note(type(self).__name__, "reset_workspace_buffer", workspace, integers)
        assert workspace is self.workspace
        self._int_workspace_buffer = integers

    def planned(
        self,
        starts,
        page_starts,
        numbers,
        last,
        heads,
        kv_heads,
        head_dim,
        page,
        *,
        window_left,
        q_data_type,
        kv_data_type,
    ):
        assert {each.dtype for each in (starts, page_starts, numbers, last)} == {torch.int32}
        numbers = near(numbers)
        assert q_data_type == kv_data_type
        assert (last >= 1).all()
        assert (last <= page).all()
        self.where = starts, page_starts, numbers, last
        self.shape = heads, kv_heads, head_dim, page
        self.window_left = window_left
        self.library.plans.append((window_left, len(last)))

    def run(self, query, pool, *, out):
        self.library.note(type(self).__name__, "run", query, pool, out=out)
        query, out, pool = near(query), near(out), tuple(map(near, pool))
        starts, page_starts, numbers, last = (each.tolist() for each in self.where)
        heads, kv_heads, head_dim, page = self.shape
        assert query.shape == out.shape == (starts[-1], heads, head_dim)
        assert pool[0].shape[1:] == (page, kv_heads, head_dim)
        assert pool[0].stride() == pool[1].stride()
        for row, held in enumerate(last):
            blocks = numbers[page_starts[row] : page_starts[row + 1]]
            context = (len(blocks) - 1) * page + held
            keys, values = (
                side[blocks].reshape(-1, kv_heads, head_dim)[:context].float() for side in pool
            )
            asking = query[starts[row] : starts[row + 1]].float()
            # The last query is the last token, and as many before it are read as the window says.
            asked = torch.arange(context - len(asking), context).unsqueeze(1)
            hidden = torch.arange(context) > asked
            if self.window_left >= 0:
                hidden |= torch.arange(context) < asked - self.window_left
            shared = asking.view(len(asking), kv_heads, heads // kv_heads, head_dim)
            scores = torch.einsum("qkgd,tkd->kgqt", shared, keys) / math.sqrt(head_dim)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            read = torch.einsum("kgqt,tkd->qkgd", weights, values)
            out[starts[row] : starts[row + 1]] = read.reshape(asking.shape).to(out.dtype)
