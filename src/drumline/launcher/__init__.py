"""Starts the ranks of an engine, watches them, and stops the whole tree.

It does not know what a rank does.
"""
