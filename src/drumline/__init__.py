"""drumline: an LLM inference engine whose ranks keep in step."""

__version__ = "0.1.0"
