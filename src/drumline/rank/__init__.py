"""The one place where both planes exist: build, wire up, serve, stop.

It holds no policy.
"""
