"""Merges and their explanations, from a job's tape."""
