"""The audit log: records of calls that changed something or were refused, in append-only files of chained JSON
lines."""
