"""Render the manifests of an installation on Kubernetes from one file of values."""
