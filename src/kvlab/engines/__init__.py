"""transformers and vLLM behind one interface, a folder each: `ENGINE` says what is true of it, `engine.py` runs it."""
