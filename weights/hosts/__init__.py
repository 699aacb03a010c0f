"""The way by hosts: each keeps versions in shared memory, and the relays of hosts send them to each other."""
