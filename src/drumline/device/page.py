"""The size of this device's page, for whoever must know it without loading the device."""

from drumline.core.errors import ConfigError

BLOCK_TOKENS = 16
"""Tokens a block of KV memory holds."""


def check_granularity(tokens: int) -> None:
    """Raise ConfigError unless prefix pages of so many tokens are whole device pages."""
    if tokens % BLOCK_TOKENS:
        raise ConfigError(
            "--prefix-granularity",
            f"{tokens} is no multiple of the device page of {BLOCK_TOKENS} tokens",
        )
