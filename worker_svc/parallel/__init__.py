"""Tensor parallelism: the ranks of a replica, how they find each other, and what passes between them."""
