"""The store and what is served from it: how long a model takes to answer, and what several processes share."""
