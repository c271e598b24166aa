"""What each verb of the command line does, and the flags of those that come in groups."""
