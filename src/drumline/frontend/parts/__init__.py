"""What an answer's text is made of: reasoning, words, and calls of tools.

Small machines over text as it comes. However it is cut into deltas, they find the same, and
what turns out not to be a call comes out as words: no character is lost.
"""
