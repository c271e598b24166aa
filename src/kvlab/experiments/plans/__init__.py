"""The cells of each study, one file per study; `experiments.plan` finds them by name. Torch-free."""
