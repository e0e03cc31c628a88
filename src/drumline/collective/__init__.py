"""Exchanges among a group's ranks: gather, broadcast, reduce.

It does not know what the bytes mean.
"""
