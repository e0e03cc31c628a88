"""Which token follows: from logits to ids.

It knows how a request wants its tokens drawn and what it has said so far; it does
not know models, blocks or plans.

Thread: forward thread only.
"""
