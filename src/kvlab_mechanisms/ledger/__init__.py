"""What was made of what: a log that only grows, whose past cannot be changed unseen, and contracts of what is read."""
