"""The terminal view of a running engine.

It knows no engine internals.
"""
