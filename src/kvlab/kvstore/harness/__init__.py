"""Whether restoring from a snapshot can be told from never having saved one: arms, their runs, and one verdict."""
