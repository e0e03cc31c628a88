"""JSON schemas: what is honoured, and how it is written for a compiler.

A compiler ignores much of what it does not know, and then produces what its schema
forbids. So a schema is written anew from what is honoured, and every keyword that asserts
something else is refused by its name.
"""
