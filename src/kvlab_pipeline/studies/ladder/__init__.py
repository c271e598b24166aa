"""Every codec beside the others at the same bits."""
