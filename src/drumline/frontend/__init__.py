"""The HTTP face of the engine: OpenAI API, chat templates, tokenizing, detokenizing.

Of the engine it sees `client` only, and it never loads torch.
"""
