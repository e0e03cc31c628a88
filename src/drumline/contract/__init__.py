"""Plain values and Protocols that cross planes and seams.

It holds no logic beyond encoding a value, and no tensors.
"""
