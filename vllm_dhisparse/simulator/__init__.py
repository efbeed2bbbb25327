"""Residency in virtual time: the package's own policies, with time and bytes as a model."""
