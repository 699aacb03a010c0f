"""A learner on several hosts: the host's position, the rendezvous, and the end of a session on all hosts."""
