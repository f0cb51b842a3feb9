"""What an exercise begins with: skeletons to be filled, and strategies with a bug to be found."""
