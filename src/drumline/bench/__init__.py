"""Measuring: a load for a running server, and what profiles of several ranks say together.

It knows no engine internals.
"""
