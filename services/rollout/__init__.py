"""The rollout service: takes leases, submits groups, and receives weights while it samples."""
