"""Inference engines behind one interface; `registry.start` loads the one that is asked for."""
