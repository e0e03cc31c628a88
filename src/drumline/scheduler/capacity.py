"""How many tokens one request can have in a pool, alone."""

from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.scheduler.config import SchedulerConfig

_STATE_BLOCKS = 2
"""What a forward reads, and what it writes."""


def max_request_tokens(config: SchedulerConfig) -> int:
    """Return the longest prompt plus answer that always fits an otherwise empty pool.

    Where prefixes are cached, one block a group is left for the copy of a block that is
    shared in part; and there is room for the decodes planned ahead.
    """
    ahead = config.overlap_depth * config.decode_tokens
    low, high = 0, _most(config)
    while low < high:
        middle = (low + high + 1) // 2
        if _parents(config, middle + ahead) <= config.num_pages - 1:
            low = middle
        else:
            high = middle - 1
    return low


def _most(config: SchedulerConfig) -> int:
    """Return what the groups that keep all tokens have blocks for; a window never fills up."""
    pages = config.num_pages - 1
    groups = config.paged_groups
    sizes = [group.blocks_per_parent * group.block_tokens for group in groups]
    keeping = [
        size for size, group in zip(sizes, groups, strict=True) if group.window_tokens is None
    ]
    if keeping:
        return pages * min(keeping)
    return max(pages * min(sizes), config.max_model_tokens or 0)


def _parents(config: SchedulerConfig, tokens: int) -> int:
    return sum(
        -(-_blocks(config, group, tokens) // group.blocks_per_parent) for group in config.groups
    )


def _blocks(config: SchedulerConfig, group: CacheGroup, tokens: int) -> int:
    if group.kind is AttentionKind.STATE:
        return _STATE_BLOCKS
    blocks = -(-tokens // group.block_tokens) + config.prefix_caching
    if group.window_tokens is not None:
        # What a chunk computes, and what its first token looks back on.
        most = group.window_tokens + config.max_scheduled_tokens + config.decode_tokens
        most += config.unsure_tokens
        blocks = min(blocks, -(-most // group.block_tokens) + 2)
    return blocks
