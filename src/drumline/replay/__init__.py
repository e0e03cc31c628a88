"""Recorded and simulated rounds: a fake data plane, a virtual clock, faults.

It is not a second scheduler: it drives the real one.
"""
