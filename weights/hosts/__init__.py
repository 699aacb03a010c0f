"""Weights by hosts: each host keeps versions in shared memory, and the hosts' relays send them to each other."""
