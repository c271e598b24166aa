"""Text to fixed windows of tokens: the corpus, its sources, and needles to retrieve."""
