"""Anthropic's API of messages: its requests brought into chat requests, its answers and errors."""
