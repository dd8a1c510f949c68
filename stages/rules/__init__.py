"""Ways of deciding which proposed tokens the target agrees with."""
