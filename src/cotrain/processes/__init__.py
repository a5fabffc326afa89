"""A run of several processes over a shared store: workers, one trainer per model, an evaluator, and who starts them."""
