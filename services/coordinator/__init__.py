"""The coordinator: runs, members and versions (gRPC), the exchange (ZeroMQ), and the ledger under both."""
