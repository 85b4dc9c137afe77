"""The journal of merges, and the synchroniser's death at every point of a round."""
