"""The message schema of the engine's frontend wire and its codec, byte for byte.

It opens no socket and knows no engine default.
"""
