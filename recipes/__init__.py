"""What people launch: only differences from conf/base.yaml. Data only."""
