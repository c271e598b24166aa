"""`klt`: the calibrated transform codec, and the fit of its components."""
