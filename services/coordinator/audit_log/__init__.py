"""The audit log: who changed something or was refused. Append-only files of JSON lines, each record chained to the one
before."""
