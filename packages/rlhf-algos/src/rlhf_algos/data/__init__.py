"""Rows of data sets and the examples made of them."""
