"""What everything rests on: errors, recipes, parameters, records, and the model on disk. Loads nothing heavy."""
