"""The store and models served from it: time to the first answer, and memory shared by several processes."""
