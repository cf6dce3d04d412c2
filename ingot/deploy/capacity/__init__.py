"""Capacity planning: a simulation of servers, and the number of replicas that hold an objective."""
