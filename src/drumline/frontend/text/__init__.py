"""Text and token ids: tokenizers, incremental decoding, stop strings, chat templates.

It knows neither HTTP nor the engine.
"""
