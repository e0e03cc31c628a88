"""The event loop of a rank, and one module for each domain it coordinates.

It runs no device work and cannot reach any.
"""
