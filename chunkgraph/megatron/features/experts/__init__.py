"""Mixture of experts: fixed shapes of dispatch, counts of tokens without room, refusals."""
