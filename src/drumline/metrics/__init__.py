"""Metric objects, and how they reach Prometheus.

It does not decide when anything is recorded.
"""
