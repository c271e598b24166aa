"""What all else rests on: errors and their codes, recipes, parameters, records, the model on disk. Nothing heavy."""
