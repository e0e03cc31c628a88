"""HTTP as this server speaks it: bodies in, replies and event streams out, errors in one shape.

It knows neither models nor engines.
"""
