"""The size of this device's page, for whoever must know it without loading the device."""

BLOCK_TOKENS = 16
"""Tokens a block of KV memory holds."""
