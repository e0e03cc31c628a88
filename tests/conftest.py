"""Settings that all tests share."""

import os

from hypothesis import settings

# A machine under load is no failure: examples have no time limit of their own. The tests of
# a change play the same examples wherever they run, so that what fails is the change; new
# examples are for the soaks, which play many more of them.
SOAKING = any(name.startswith("DRUMLINE_SOAK") for name in os.environ)
settings.register_profile("drumline", deadline=None, derandomize=not SOAKING)
settings.load_profile("drumline")
