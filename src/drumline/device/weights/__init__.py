"""A checkpoint's tensors, by the names of the Hugging Face layout.

It reads files and undoes what their formats did to a tensor (quantization,
reordering, naming). It does not know what a tensor is for.

Thread: forward thread only, as everything that makes tensors.
"""
