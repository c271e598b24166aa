"""Which cache format one's own model bears: measured on one's text, chosen, confirmed, and said to the gate."""
