"""The rules by which a synchronous job on many slices stalls, shrinks and grows: a model of the world, decided purely."""
