"""The audit log: who changed something or was refused, as append-only files of chained JSON lines."""
