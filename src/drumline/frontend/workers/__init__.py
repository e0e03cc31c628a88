"""Several HTTP workers behind one port: what they and the owner of the engine's link say.

The owner routes deltas and keeps what the workers must agree on; workers speak HTTP and text.
"""
