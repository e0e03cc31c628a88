"""An engine owned by a Python program: `LLM`, and `AsyncLLM` for asyncio.

It knows nothing of HTTP.
"""
