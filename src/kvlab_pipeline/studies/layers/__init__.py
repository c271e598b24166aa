"""What each layer costs: coded alone, and left out."""
