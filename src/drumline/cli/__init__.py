"""The `drumline` command: verbs and flags derived from the configuration structs.

It holds no defaults and no logic.
"""
