"""`LLM` and `AsyncLLM`: an engine owned by a Python program.

It knows no HTTP.
"""
