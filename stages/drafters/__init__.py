"""Ways of proposing tokens before the target has scored them."""
