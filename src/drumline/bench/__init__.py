"""Load generation and its tables.

It knows no engine internals.
"""
