"""A frontend's link to engines: handshake, routing, streams, aborts, calls.

It knows neither HTTP nor text.
"""
