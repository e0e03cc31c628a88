"""Routes beside OpenAI's that users of other engines know: generating, tokens, aborts, state."""
