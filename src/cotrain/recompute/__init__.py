"""What other settings would have made of a run's stored groups: credits, advantages, shares of the gradient."""
