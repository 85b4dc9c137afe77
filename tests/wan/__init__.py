"""Tests on real networks: a Ray cluster whose nodes live in network namespaces of this machine."""
