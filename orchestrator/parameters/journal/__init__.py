"""What merges made, kept so that it survives the synchroniser: Θ, momentum, version and contributors of every fragment."""
