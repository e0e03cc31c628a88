"""Which requests run, in which blocks, with which cache work: a pure function of state and events.

It does no I/O, keeps no time, draws no lots and holds no tensor.
"""
