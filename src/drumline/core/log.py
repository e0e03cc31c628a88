"""Logging set-up of a process: one line an event, to stderr."""

import logging

_FORMAT = "%(asctime)s %(levelname)s [{name}] %(message)s"


def configure(process: str, level: str) -> None:
    """Send this process's log to stderr, each line marked with `process`."""
    logging.basicConfig(level=level.upper(), format=_FORMAT.format(name=process), force=True)
