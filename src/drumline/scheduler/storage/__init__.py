"""The storage tier behind host memory, as the scheduler sees it: transactions, not objects."""
