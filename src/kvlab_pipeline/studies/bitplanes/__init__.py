"""How well a few bits of each key say which tokens attention will look at."""
