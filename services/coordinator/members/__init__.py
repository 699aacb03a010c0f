"""Who belongs to the system: bookkeeping with a clock, fed by the pool."""
