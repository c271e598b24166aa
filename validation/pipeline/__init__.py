"""The pipeline on trial: killed, on a scheduler, measured again, and what it costs. Programs; `make` calls them."""
