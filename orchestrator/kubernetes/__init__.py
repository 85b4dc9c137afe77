"""Manifests of a whole installation on Kubernetes, made from one file of values."""
