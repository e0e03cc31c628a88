"""The models that can be served, in plain PyTorch.

A model knows its layers and weights. It does not know requests, blocks or
sampling, and of the attention and linear kernels only what they compute.
"""
