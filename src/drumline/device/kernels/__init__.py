"""Native kernels: C++ that is compiled where it runs, for the processor it runs on.

They know addresses, numbers and threads; no tensors and no models.
"""
