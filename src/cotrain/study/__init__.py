"""Studies: arms x seeds under equal budgets, and what they show."""
