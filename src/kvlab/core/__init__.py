"""What all else rests on: errors, recipes, parameters and their messages, records, the model on disk. Nothing heavy."""
