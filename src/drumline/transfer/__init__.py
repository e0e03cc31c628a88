"""Prefill/decode and encode peers: rooms, routes, manifests, chunks.

It does not schedule and holds no tensor.
"""
