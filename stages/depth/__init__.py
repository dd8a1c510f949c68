"""Ways of deciding how many tokens to draft."""
