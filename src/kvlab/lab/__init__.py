"""The measuring of cells on windows: plans, taps, scoring, and the job that runs them."""
