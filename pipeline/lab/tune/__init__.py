"""From short measurements on this machine to a recipe: `headrace tune`."""
