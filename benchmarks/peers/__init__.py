"""drumline beside what a user would pick instead: the same prompts, the same threads, in turn.

`python -m benchmarks.peers`, or `make bench-peers`. A peer is a module that knows how it is
installed (`install`) and started, and gives an `engine.Engine`; it knows nothing of what is
asked (`work`), how often and in which order (`contest`), or of what is made of the answers
(`figures`, `bars`, `report`).
"""
