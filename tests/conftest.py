"""Settings that all tests share."""

from hypothesis import settings

# A machine under load is no failure: examples have no time limit of their own.
settings.register_profile("drumline", deadline=None)
settings.load_profile("drumline")
