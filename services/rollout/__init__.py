"""The rollout service: leases in, groups out, weights received while it samples."""
