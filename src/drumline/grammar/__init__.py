"""Compiling grammars and matching tokens against them.

It knows neither requests nor scheduling.
"""
