"""A small seeded world of islands, links and faults that drives the real core, for tests and for what-if questions."""
