"""Measuring: what profiles of several ranks say together.

It knows no engine internals.
"""
