"""The gRPC server of each role, and the coordinator, which contains the exchange and the ledger."""
