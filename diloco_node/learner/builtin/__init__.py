"""The built-in trainer: model, data and loop of a run that brings no training script of its own."""
