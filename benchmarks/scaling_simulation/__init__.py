"""A discrete-event simulation of the pools of one run, which the scaling policy of the coordinator drives."""
