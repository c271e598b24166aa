"""How far coded caches are from the least bits that their errors could be had for, and where the rest goes."""
