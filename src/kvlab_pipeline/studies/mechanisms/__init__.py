"""What the gate judges: every codec and an engine's own cache dtypes, on text and on needles."""
