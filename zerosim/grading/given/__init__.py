"""The start of an exercise: skeletons to fill, and strategies with a bug to find."""
