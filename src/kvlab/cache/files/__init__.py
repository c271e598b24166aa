"""Files: a recipe, a calibration (``klt4.kv``), a coded cache; and each of them made ready for a model."""
