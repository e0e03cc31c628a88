"""OpenAI's API of responses, for text: its requests as chat requests, its items and events."""
