"""One gRPC server for each role, and the coordinator that holds exchange and ledger."""
