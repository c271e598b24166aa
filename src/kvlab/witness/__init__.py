"""What the chain claims, computed again by other code: `plain.py` is the model, `testify.py` the comparison."""
