"""The journal of merges, which survives the synchroniser: Θ, momentum, version and contributors of every fragment."""
