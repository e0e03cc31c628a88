"""OpenAI's API: what its requests hold, how they are checked, and what its answers look like."""
