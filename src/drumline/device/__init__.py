"""Everything that touches the accelerator: models, caches, kernels, the forward thread.

It knows neither the scheduler, nor the wire, nor the mesh.
"""
