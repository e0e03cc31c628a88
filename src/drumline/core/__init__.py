"""Words every room shares: configuration, errors, clock, ids, hashing, logging set-up.

It knows no other room.
"""
