"""The L3 cache tier: object naming, host pool, queues, workers, stores.

It never touches device pages.
"""
