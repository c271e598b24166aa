"""What vouches for kvlab, run from a checkout: planted truth, the published study, a bench, the reference model."""
