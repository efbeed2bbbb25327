"""A tiny DSA model that is trained: recipe, drafters and figures."""
