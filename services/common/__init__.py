"""What every service needs: its server, its membership, its options, its log."""
