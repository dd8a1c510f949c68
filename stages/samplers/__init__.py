"""Ways of choosing a token from the target's scores, on the host."""
