"""What can be chosen: one folder a group, one YAML an option. Data only."""
