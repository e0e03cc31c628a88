"""Which requests run, in which blocks, with which cache work: a pure function of state and events.

It does no I/O, keeps no time, draws no lots and holds no tensor. The room's door is
`scheduler.Scheduler`, with `config.SchedulerConfig` and the values in `events`.
"""
