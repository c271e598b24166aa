"""Where to spend bytes: chosen on the calibration split, judged on the test split."""
