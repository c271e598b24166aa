"""vLLM's pages hold a recipe's coded bytes: a token's layout, attention over it, vLLM's backend around both."""
