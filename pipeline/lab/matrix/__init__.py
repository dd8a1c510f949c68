"""The promises, tried for every combination of choices on tiny models: `headrace matrix`."""
